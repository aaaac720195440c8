#include "common/model/families/vision_language_family.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/model/families/keys/family_keys.h"

namespace tandem {
namespace {

absl::Status ReadTokenIds(const ConfigFields& fields, int64_t vocab_size, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(vision.image_token_id, fields.Count("image_token_id"));
  TANDEM_ASSIGN_OR_RETURN(vision.video_token_id, fields.Count("video_token_id"));
  for (const auto& [key, id] : {std::pair("image_token_id", vision.image_token_id),
                                std::pair("video_token_id", vision.video_token_id)}) {
    if (id < vocab_size) continue;
    return InvalidField(fields.Path(key),
                        absl::StrCat("is ", id, ", outside the vocabulary of ", vocab_size));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<ConfigSection> VisionLanguageFamily::Keys() const {
  return {{.object = "", .keys = QwenVlKeys()},
          {.object = "text_config", .keys = keys()},
          {.object = "rope_parameters", .keys = RopeKeys()},
          {.object = "vision_config", .keys = vision_keys_},
          {.object = "vision_config.rope_parameters", .keys = VisionRopeKeys()}};
}

absl::Status VisionLanguageFamily::ReadConfig(const ConfigFields& all, ModelConfig& config) const {
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json outer, ObeyedKeys(all, QwenVlKeys()));
  const ConfigFields fields(outer, all.path());
  TANDEM_ASSIGN_OR_RETURN(const auto nested, fields.Object("text_config"));
  const ConfigFields text = nested.value_or(all);
  if (nested.has_value()) config.text_path = "text_config.";
  TANDEM_RETURN_IF_ERROR(DecoderFamily::ReadConfig(text, config));
  if (config.rope.mrope_section.empty()) config.rope.mrope_section = {16, 24, 24};
  if (const auto& section = config.rope.mrope_section;
      section[0] + section[1] + section[2] != config.head_dim / 2) {
    return InvalidField(text.Path("rope_parameters.mrope_section"),
                        absl::StrCat("is missing, and the default (16, 24, 24) is for heads of "
                                     "128, not of ",
                                     config.head_dim));
  }
  // `transformers` ties the head if either object says so.
  TANDEM_ASSIGN_OR_RETURN(const bool tied, fields.Bool("tie_word_embeddings"));
  config.tie_word_embeddings = config.tie_word_embeddings || tied;
  TANDEM_ASSIGN_OR_RETURN(const auto vision, fields.Object("vision_config"));
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json tower, ObeyedKeys(*vision, vision_keys_));
  TANDEM_ASSIGN_OR_RETURN(config.vision,
                          vision_(ConfigFields(tower, vision->path()), config.hidden_size));
  return ReadTokenIds(fields, config.vocab_size, *config.vision);
}

std::string VisionLanguageFamily::ParameterName(absl::string_view tensor) const {
  if (absl::ConsumePrefix(&tensor, "model.language_model.") ||
      absl::ConsumePrefix(&tensor, "language_model.")) {
    return absl::StrCat("model.", tensor);
  }
  if (absl::ConsumePrefix(&tensor, "model.visual.")) return absl::StrCat("visual.", tensor);
  return std::string(tensor);
}

std::vector<WeightFileSize> VisionLanguageFamily::WeightFileSizes(const ModelConfig& config) const {
  const VisionConfig& vision = *config.vision;
  const char* const width = vision.gated_mlp ? "vision_config.hidden_size"  // Qwen2.5-VL
                                             : "vision_config.embed_dim";
  std::vector<WeightFileSize> sizes = DecoderFamily::WeightFileSizes(config);
  sizes.push_back({"visual.blocks.0.attn.proj.weight", 0, vision.width, width});
  sizes.push_back({absl::StrCat("visual.blocks.", vision.depth - 1, ".attn.proj.weight"), 1,
                   vision.width, width});
  return sizes;
}

}  // namespace tandem
