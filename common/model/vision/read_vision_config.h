// Reads the vision towers of Qwen2-VL and Qwen2.5-VL from config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_
#define TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/model/config_fields.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

// These read `vision_config` and the ids of image and video tokens of `fields`, with the defaults
// of `transformers`. INVALID_ARGUMENT with the field's path for what is missing or does not fit a
// text model of `hidden_size` and `vocab_size`; UNIMPLEMENTED for another activation or rotation.
absl::StatusOr<VisionConfig> ReadQwen2VlVision(const ConfigFields& fields, int64_t hidden_size,
                                               int64_t vocab_size);
absl::StatusOr<VisionConfig> ReadQwen25VlVision(const ConfigFields& fields, int64_t hidden_size,
                                                int64_t vocab_size);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_READ_VISION_CONFIG_H_
