// Reads the vision towers of Qwen2-VL and Qwen2.5-VL from config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_
#define TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

// These read the keys of `vision_config` that ObeyedKeys returned. INVALID_ARGUMENT with the
// field's path for what does not fit a text model of `hidden_size`; UNIMPLEMENTED for another
// rotation.
absl::StatusOr<VisionConfig> ReadQwen2VlVision(const ConfigFields& tower, int64_t hidden_size);
absl::StatusOr<VisionConfig> ReadQwen25VlVision(const ConfigFields& tower, int64_t hidden_size);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_
