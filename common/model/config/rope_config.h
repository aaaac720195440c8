// Reads the rotary position embedding of a config.json. No torch; rope.h computes its frequencies.
#ifndef TANDEM_COMMON_MODEL_CONFIG_ROPE_CONFIG_H_
#define TANDEM_COMMON_MODEL_CONFIG_ROPE_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/model_config.h"

namespace tandem {

// The settings of a model, beside the keys of its rotation, on which the rotation depends.
struct RopeModel {
  int64_t max_position_embeddings = 0;
  int64_t head_dim = 0;
  // Whether the family computes rotations of some of a head's columns (`partial_rotary_factor`).
  bool partial_rotary = false;
};

// Returns the object that has a model's rotation: `rope_scaling` unless it is absent or empty, then
// `rope_parameters`, as `transformers` chooses between the two. INVALID_ARGUMENT with the field's
// path for a value that is no object.
absl::StatusOr<std::optional<ConfigFields>> RopeObject(const ConfigFields& fields);

// Returns the type of such an object: `rope_type`, else `type`, else "default".
absl::StatusOr<std::string> RopeType(const ConfigFields& rope);

// Reads the object of RopeObject; what it does not say is in `rope_theta` and
// `partial_rotary_factor`. `original_max_position_embeddings` of config.json itself comes before
// the object's. INVALID_ARGUMENT with the field's path; UNIMPLEMENTED for other rope types, and for
// partial rotary where the family lacks it. `fields` are those that ObeyedKeys returned.
//
// The rotation of a position never depends on the length of its sequence: a cached key would be
// wrong as soon as the sequence grows. Two types depend on it in `transformers`:
//   dynamic    has the default rotation up to max_position_embeddings. No server takes longer
//              sequences, so it is the default rotation here.
//   longrope   has short_factor up to original_max_position_embeddings and long_factor for all
//              positions of a longer sequence. With lists that differ, the longest sequence of the
//              model is original_max_position_embeddings; with equal ones, max_position_embeddings.
absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields, RopeModel model);

// The rotations of a model whose layers with a window have one of their own (Gemma 3).
struct LayerRopes {
  RopeConfig full, sliding;
};

// Reads `rope_parameters` with an object for each type of layer. The keys of `rope_scaling` replace
// those of layers without a window; `rope_theta` and `rope_local_base_freq` are the bases of layers
// without and with a window that their object does not have. Errors as those of ReadRopeConfig.
absl::StatusOr<LayerRopes> ReadLayerRopes(const ConfigFields& fields, RopeModel model);

// Returns the bytes of a model's tables of cosines and sines, in float32, once it has read
// sequences of up to `longest` tokens: an upper estimate by the positions that they take ahead. A
// vision tower's table, of 512 positions, is left out.
int64_t RotaryTableBytes(const ModelConfig& config, int64_t longest);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_ROPE_CONFIG_H_
