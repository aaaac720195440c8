// The parameters of a vision tower. No torch.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_PARAMETERS_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_PARAMETERS_H_

#include <cstdint>

#include "common/model/families/parameter_list.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

// Declares the parameters of a tower whose rows have `hidden_size` values. Every shard of a model
// holds all of them.
void AddVisionTower(const VisionConfig& vision, int64_t hidden_size, ParameterList& list);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_PARAMETERS_H_
