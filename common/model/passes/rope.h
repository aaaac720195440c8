// Frequencies of rotary position embeddings, with the usual context extensions.
#ifndef TANDEM_COMMON_MODEL_PASSES_ROPE_H_
#define TANDEM_COMMON_MODEL_PASSES_ROPE_H_

#include <vector>

#include "common/model/config/model_config.h"

namespace tandem {

struct RopeFrequencies {
  std::vector<float> inverse;  // one per pair of dimensions: dim / 2 values
  double attention_scaling;    // factor on cosines and sines (yarn, longrope), 1 otherwise
};

// Returns the same numbers as `transformers` (modeling_rope_utils), for `dim` columns of a head.
RopeFrequencies ComputeRopeFrequencies(const RopeConfig& rope, int64_t dim);

// Returns the factor by which yarn with `mscale_all_dim` changes the scale of DeepSeek's attention:
// (0.1 mscale_all_dim ln(factor) + 1)^2, else 1.
double YarnScoreFactor(const RopeConfig& rope);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_ROPE_H_
