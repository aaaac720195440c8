// Selects the parameters that train. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_FREEZE_H_
#define TANDEM_COMMON_MODEL_CONFIG_FREEZE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/config/parameter_spec.h"

namespace tandem {

// Returns one entry per parameter: false if its name matches a `freeze` pattern of fnmatch(3), in
// which `*` also matches dots ("model.layers.0.*", "*norm.weight"). INVALID_ARGUMENT for
// "freeze[i]" when a pattern matches nothing, and for "freeze" when nothing is left to train.
absl::StatusOr<std::vector<bool>> TrainableParameters(const std::vector<ParameterSpec>& specs,
                                                      const std::vector<std::string>& freeze);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_FREEZE_H_
