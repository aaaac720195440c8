#include "common/model/families/vision_language_family.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/config_fields.h"

namespace tandem {
namespace {

constexpr double kDefaultTheta = 1e6;

// Whether config.json says the base of the rotation, in either style.
absl::StatusOr<bool> HasTheta(const ConfigFields& fields) {
  if (fields.Find("rope_theta") != nullptr) return true;
  TANDEM_ASSIGN_OR_RETURN(const auto rope, fields.Object("rope_parameters"));
  return rope.has_value() && rope->Find("rope_theta") != nullptr;
}

}  // namespace

absl::Status VisionLanguageFamily::ReadConfig(const ConfigFields& fields,
                                              ModelConfig& config) const {
  TANDEM_ASSIGN_OR_RETURN(const auto nested, fields.Object("text_config"));
  const ConfigFields text = nested.value_or(fields);
  if (nested.has_value()) config.text_path = "text_config.";
  TANDEM_RETURN_IF_ERROR(DecoderFamily::ReadConfig(text, config));
  TANDEM_ASSIGN_OR_RETURN(const bool has_theta, HasTheta(text));
  if (!has_theta) config.rope.theta = kDefaultTheta;
  if (config.rope.mrope_section.empty()) config.rope.mrope_section = {16, 24, 24};
  if (const auto& section = config.rope.mrope_section;
      section[0] + section[1] + section[2] != config.head_dim / 2) {
    return InvalidField(text.Path("rope_parameters.mrope_section"),
                        absl::StrCat("is missing, and the default (16, 24, 24) is for heads of "
                                     "128, not of ",
                                     config.head_dim));
  }
  // `transformers` ties the head if either object says so.
  TANDEM_ASSIGN_OR_RETURN(const bool tied, fields.Bool("tie_word_embeddings", false));
  config.tie_word_embeddings = config.tie_word_embeddings || tied;
  std::set<int64_t> eos;
  TANDEM_RETURN_IF_ERROR(text.AppendIds("eos_token_id", eos));
  config.eos_token_ids.assign(eos.begin(), eos.end());
  TANDEM_ASSIGN_OR_RETURN(config.vision, vision_(fields, config.hidden_size, config.vocab_size));
  return absl::OkStatus();
}

std::string VisionLanguageFamily::ParameterName(absl::string_view tensor) const {
  if (absl::ConsumePrefix(&tensor, "model.language_model.")) return absl::StrCat("model.", tensor);
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
