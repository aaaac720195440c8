#include "common/model/vision/read_vision_config.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

// No tower is anywhere near these; without them a broken file could ask for any product of sizes.
constexpr int64_t kMaxDepth = 4096, kMaxWidth = int64_t{1} << 20, kMaxPatch = 256, kMaxFactor = 16;

absl::StatusOr<int64_t> SizeUpTo(int64_t limit, const ConfigFields& fields, absl::string_view key,
                                 std::optional<int64_t> fallback) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t size, fields.Size(key, fallback));
  if (size <= limit) return size;
  return InvalidField(fields.Path(key), absl::StrCat("must be at most ", limit));
}

absl::Status RefuseOtherActivation(const ConfigFields& fields, absl::string_view known) {
  TANDEM_ASSIGN_OR_RETURN(const std::string act, fields.String("hidden_act", known));
  if (act == known) return absl::OkStatus();
  return fields.NotSupported("hidden_act", absl::StrCat("activation '", act, "'"));
}

absl::Status ReadRotation(const ConfigFields& fields, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(const auto rope, fields.Object("rope_parameters"));
  if (!rope.has_value()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const std::string type, rope->String("rope_type", "axial"));
  if (type != "axial") {
    return rope->NotSupported("rope_type", absl::StrCat("rope type '", type, "'"));
  }
  TANDEM_ASSIGN_OR_RETURN(vision.rope_theta, rope->Positive("rope_theta", vision.rope_theta));
  return absl::OkStatus();
}

// Reads the keys that both towers share; `width_key` names the width of a patch.
absl::Status ReadCommon(const ConfigFields& fields, const char* width_key, VisionConfig& vision) {
  const auto factor = [&](absl::string_view key, int64_t fallback) {
    return SizeUpTo(kMaxFactor, fields, key, fallback);
  };
  TANDEM_ASSIGN_OR_RETURN(vision.depth, SizeUpTo(kMaxDepth, fields, "depth", 32));
  TANDEM_ASSIGN_OR_RETURN(vision.width, SizeUpTo(kMaxWidth, fields, width_key, std::nullopt));
  TANDEM_ASSIGN_OR_RETURN(vision.num_heads, fields.Size("num_heads", 16));
  if (vision.width % vision.num_heads != 0 || vision.head_dim() % 4 != 0) {
    return InvalidField(fields.Path(width_key),
                        absl::StrCat("must be num_heads (", vision.num_heads,
                                     ") times a multiple of 4, for a rotation by row and column"));
  }
  TANDEM_ASSIGN_OR_RETURN(vision.in_channels, factor("in_channels", 3));
  TANDEM_ASSIGN_OR_RETURN(vision.patch_size, SizeUpTo(kMaxPatch, fields, "patch_size", 14));
  TANDEM_ASSIGN_OR_RETURN(vision.temporal_patch_size, factor("temporal_patch_size", 2));
  TANDEM_ASSIGN_OR_RETURN(vision.spatial_merge_size, factor("spatial_merge_size", 2));
  return ReadRotation(fields, vision);
}

// The rows of the tower are rows of the text model.
absl::Status CheckOutputWidth(const ConfigFields& fields, const char* key, int64_t hidden_size) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t width, fields.Size(key));
  if (width == hidden_size) return absl::OkStatus();
  return InvalidField(fields.Path(key),
                      absl::StrCat("is ", width, ", and the text model has rows of ", hidden_size));
}

absl::Status ReadTokenIds(const ConfigFields& fields, int64_t vocab_size, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(vision.image_token_id, fields.Count("image_token_id", 151655));
  TANDEM_ASSIGN_OR_RETURN(vision.video_token_id, fields.Count("video_token_id", 151656));
  for (const auto& [key, id] : {std::pair("image_token_id", vision.image_token_id),
                                std::pair("video_token_id", vision.video_token_id)}) {
    if (id < vocab_size) continue;
    return InvalidField(fields.Path(key),
                        absl::StrCat("is ", id, ", outside the vocabulary of ", vocab_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<ConfigFields> Tower(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(const auto tower, fields.Object("vision_config"));
  if (tower.has_value()) return *tower;
  return InvalidField(fields.Path("vision_config"), "is missing");
}

absl::Status ReadWindows(const ConfigFields& fields, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(vision.window_size, fields.Size("window_size", 112));
  if (vision.window_size < vision.patch_size * vision.spatial_merge_size) {
    return InvalidField(
        fields.Path("window_size"),
        absl::StrCat("must hold the ", vision.spatial_merge_size, " patches squared of ",
                     vision.patch_size, " pixels that become a row"));
  }
  if (fields.Find("fullatt_block_indexes") == nullptr) {
    vision.full_attention_layers = {7, 15, 23, 31};
    return absl::OkStatus();
  }
  return fields.AppendIds("fullatt_block_indexes", vision.full_attention_layers);
}

}  // namespace

absl::StatusOr<VisionConfig> ReadQwen2VlVision(const ConfigFields& fields, int64_t hidden_size,
                                               int64_t vocab_size) {
  TANDEM_ASSIGN_OR_RETURN(const ConfigFields tower, Tower(fields));
  VisionConfig vision;
  TANDEM_RETURN_IF_ERROR(ReadCommon(tower, "embed_dim", vision));
  TANDEM_RETURN_IF_ERROR(RefuseOtherActivation(tower, "quick_gelu"));
  TANDEM_RETURN_IF_ERROR(CheckOutputWidth(tower, "hidden_size", hidden_size));
  TANDEM_ASSIGN_OR_RETURN(const int64_t ratio, SizeUpTo(kMaxFactor, tower, "mlp_ratio", 4));
  vision.intermediate_size = vision.width * ratio;
  TANDEM_RETURN_IF_ERROR(ReadTokenIds(fields, vocab_size, vision));
  return vision;
}

absl::StatusOr<VisionConfig> ReadQwen25VlVision(const ConfigFields& fields, int64_t hidden_size,
                                                int64_t vocab_size) {
  TANDEM_ASSIGN_OR_RETURN(const ConfigFields tower, Tower(fields));
  VisionConfig vision = {.rms_norm = true, .gated_mlp = true};
  TANDEM_RETURN_IF_ERROR(ReadCommon(tower, "hidden_size", vision));
  TANDEM_RETURN_IF_ERROR(RefuseOtherActivation(tower, "silu"));
  TANDEM_RETURN_IF_ERROR(CheckOutputWidth(tower, "out_hidden_size", hidden_size));
  TANDEM_ASSIGN_OR_RETURN(vision.intermediate_size, tower.Size("intermediate_size", 3420));
  TANDEM_ASSIGN_OR_RETURN(vision.tokens_per_second, tower.Positive("tokens_per_second", 4.0));
  TANDEM_RETURN_IF_ERROR(ReadWindows(tower, vision));
  TANDEM_RETURN_IF_ERROR(ReadTokenIds(fields, vocab_size, vision));
  return vision;
}

}  // namespace tandem
