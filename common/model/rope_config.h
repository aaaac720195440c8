// Reads the rotary position embedding of a config.json. No torch; rope.h computes its frequencies.
#ifndef TANDEM_COMMON_MODEL_ROPE_CONFIG_H_
#define TANDEM_COMMON_MODEL_ROPE_CONFIG_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/model/config_fields.h"
#include "common/model/model_config.h"

namespace tandem {

// Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, for heads of `head_dim`.
// INVALID_ARGUMENT with the field's path; UNIMPLEMENTED for other rope types and partial rotary.
//
// The rotation of a position never depends on the length of its sequence: a cached key would be
// wrong as soon as the sequence grows. Two types depend on it in `transformers`:
//   dynamic    has the default rotation up to max_position_embeddings. No server takes longer
//              sequences, so it is the default rotation here.
//   longrope   has short_factor up to original_max_position_embeddings and long_factor for all
//              positions of a longer sequence. With lists that differ, the longest sequence of the
//              model is original_max_position_embeddings; with equal ones, max_position_embeddings.
absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields,
                                          int64_t max_position_embeddings, int64_t head_dim);

// The rotations of a model whose layers with a window have one of their own (Gemma 3).
struct LayerRopes {
  RopeConfig full, sliding;
};

// Reads `rope_parameters` with an object for each type of layer, or `rope_theta` with
// `rope_scaling` for layers without a window and `rope_local_base_freq` for those with one. Bases
// that are missing are those of `transformers`: 1e6 and 1e4. Errors as those of ReadRopeConfig.
absl::StatusOr<LayerRopes> ReadLayerRopes(const ConfigFields& fields,
                                          int64_t max_position_embeddings, int64_t head_dim);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_ROPE_CONFIG_H_
