// The numbers of values that images take in the passes of a vision tower, for memory plans. No
// torch.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_ACTIVATIONS_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_ACTIVATIONS_H_

#include <cstdint>

#include "common/model/vision/vision_config.h"

namespace tandem {

// Returns an upper estimate of the values per patch that a layer of the tower holds at the same
// time: its state, its norm, queries, keys and values, the first two rotated, and what it attended
// to; and three times the MLP's.
inline int64_t VisionLayerActivations(const VisionConfig& vision) {
  return 8 * vision.width + 3 * vision.intermediate_size;
}

// Returns an upper estimate of the values per patch that training holds of the whole tower: of each
// layer the same and, of memory of their own, queries, keys, values, what they attended to, the
// state before the MLP and its norm; the pixels, the ends, and the gradients of a layer.
inline int64_t VisionTrainingActivations(const VisionConfig& vision) {
  return vision.depth * (6 * vision.width + VisionLayerActivations(vision)) +
         vision.patch_values() + 4 * vision.width + VisionLayerActivations(vision);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_ACTIVATIONS_H_
