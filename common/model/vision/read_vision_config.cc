#include "common/model/vision/read_vision_config.h"

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_keys.h"
#include "common/model/config/rope_config.h"
#include "common/model/families/keys/family_keys.h"

namespace tandem {
namespace {

// No tower is anywhere near these; without them a broken file could ask for any product of sizes.
constexpr int64_t kMaxDepth = 4096, kMaxWidth = int64_t{1} << 20, kMaxPatch = 256, kMaxFactor = 16;

absl::StatusOr<int64_t> SizeUpTo(int64_t limit, const ConfigFields& fields, absl::string_view key) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t size, fields.Size(key));
  if (size <= limit) return size;
  return InvalidField(fields.Path(key), absl::StrCat("must be at most ", limit));
}

// As ReadRopeConfig reads a text model's.
absl::Status ReadRotation(const ConfigFields& fields, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(vision.rope_theta, fields.Positive("rope_theta"));
  TANDEM_ASSIGN_OR_RETURN(const auto object, RopeObject(fields));
  if (!object.has_value()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json obeyed, ObeyedKeys(*object, VisionRopeKeys()));
  const ConfigFields rope(obeyed, object->path());
  TANDEM_ASSIGN_OR_RETURN(vision.rope_theta, rope.Positive("rope_theta", vision.rope_theta));
  TANDEM_ASSIGN_OR_RETURN(const std::string type, RopeType(rope));
  if (type == "axial" || type == "default") return absl::OkStatus();
  return rope.NotSupported(rope.Find("rope_type") != nullptr ? "rope_type" : "type",
                           absl::StrCat("rope type '", type, "'"));
}

// Reads the keys that both towers share; `width_key` names the width of a patch.
absl::Status ReadCommon(const ConfigFields& fields, const char* width_key, VisionConfig& vision) {
  const auto factor = [&](absl::string_view key) { return SizeUpTo(kMaxFactor, fields, key); };
  TANDEM_ASSIGN_OR_RETURN(vision.depth, SizeUpTo(kMaxDepth, fields, "depth"));
  TANDEM_ASSIGN_OR_RETURN(vision.width, SizeUpTo(kMaxWidth, fields, width_key));
  TANDEM_ASSIGN_OR_RETURN(vision.num_heads, fields.Size("num_heads"));
  if (vision.width % vision.num_heads != 0 || vision.head_dim() % 4 != 0) {
    return InvalidField(fields.Path(width_key),
                        absl::StrCat("must be num_heads (", vision.num_heads,
                                     ") times a multiple of 4, for a rotation by row and column"));
  }
  TANDEM_ASSIGN_OR_RETURN(vision.in_channels, factor("in_channels"));
  TANDEM_ASSIGN_OR_RETURN(vision.patch_size, SizeUpTo(kMaxPatch, fields, "patch_size"));
  TANDEM_ASSIGN_OR_RETURN(vision.temporal_patch_size, factor("temporal_patch_size"));
  TANDEM_ASSIGN_OR_RETURN(vision.spatial_merge_size, factor("spatial_merge_size"));
  return ReadRotation(fields, vision);
}

// The rows of the tower are rows of the text model.
absl::Status CheckOutputWidth(const ConfigFields& fields, const char* key, int64_t hidden_size) {
  TANDEM_ASSIGN_OR_RETURN(const int64_t width, fields.Size(key));
  if (width == hidden_size) return absl::OkStatus();
  return InvalidField(fields.Path(key),
                      absl::StrCat("is ", width, ", but the text model has rows of ", hidden_size));
}

absl::Status ReadWindows(const ConfigFields& fields, VisionConfig& vision) {
  TANDEM_ASSIGN_OR_RETURN(vision.window_size, fields.Size("window_size"));
  if (vision.window_size < vision.patch_size * vision.spatial_merge_size) {
    return InvalidField(
        fields.Path("window_size"),
        absl::StrCat("must be at least the ", vision.spatial_merge_size, " patches squared of ",
                     vision.patch_size, " pixels that become a row"));
  }
  return fields.AppendIds("fullatt_block_indexes", vision.full_attention_layers);
}

}  // namespace

absl::StatusOr<VisionConfig> ReadQwen2VlVision(const ConfigFields& tower, int64_t hidden_size) {
  VisionConfig vision;
  TANDEM_RETURN_IF_ERROR(ReadCommon(tower, "embed_dim", vision));
  TANDEM_RETURN_IF_ERROR(CheckOutputWidth(tower, "hidden_size", hidden_size));
  TANDEM_ASSIGN_OR_RETURN(const int64_t ratio, SizeUpTo(kMaxFactor, tower, "mlp_ratio"));
  vision.intermediate_size = vision.width * ratio;
  return vision;
}

absl::StatusOr<VisionConfig> ReadQwen25VlVision(const ConfigFields& tower, int64_t hidden_size) {
  VisionConfig vision = {.rms_norm = true, .gated_mlp = true};
  TANDEM_RETURN_IF_ERROR(ReadCommon(tower, "hidden_size", vision));
  TANDEM_RETURN_IF_ERROR(CheckOutputWidth(tower, "out_hidden_size", hidden_size));
  TANDEM_ASSIGN_OR_RETURN(vision.intermediate_size, tower.Size("intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(vision.tokens_per_second, tower.Positive("tokens_per_second"));
  TANDEM_RETURN_IF_ERROR(ReadWindows(tower, vision));
  return vision;
}

}  // namespace tandem
