// Reads the rotary position embedding of a config.json. No torch; rope.h computes its frequencies.
#ifndef TANDEM_COMMON_MODEL_ROPE_CONFIG_H_
#define TANDEM_COMMON_MODEL_ROPE_CONFIG_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/model/config_fields.h"
#include "common/model/model_config.h"

namespace tandem {

// Reads `rope_parameters`, or `rope_theta` with `rope_scaling`. INVALID_ARGUMENT with the field's
// path; UNIMPLEMENTED for the rope types dynamic and longrope and for partial rotary.
absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigFields& fields,
                                          int64_t max_position_embeddings);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_ROPE_CONFIG_H_
