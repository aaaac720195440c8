// The optimizer's moments in a checkpoint directory. Any layout reads what any other has written.
//
// One rank writes optimizer.safetensors, which holds whole tensors. Several ranks write
// optimizer-<rank>-of-<ranks>.safetensors, whose tensors are flat ranges; the "slices" entry of
// each file's metadata (JSON) says which range of which parameter every tensor is.
#ifndef TANDEM_COMMON_PARALLEL_OPTIMIZER_OPTIMIZER_STATE_H_
#define TANDEM_COMMON_PARALLEL_OPTIMIZER_OPTIMIZER_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/parallel/parameter_range.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem::parallel {

// Returns "<parameter>" for the state tensor "<parameter>.exp_avg".
std::string ParameterOfState(absl::string_view tensor);

// Writes the file of `rank`. `state` is the training::AdamW::State of the parameters in `ranges`.
absl::Status WriteOptimizerState(const std::string& directory, int rank, int ranks,
                                 const std::vector<ParameterRange>& ranges,
                                 const NamedTensors& state);

// Returns the moments of `wanted`, flat tensors of `numel` values each, and the number of steps,
// for training::AdamW::LoadState. `trained` are the names of all parameters that train. DATA_LOSS
// names a tensor of which values are missing, or that belongs to none of `trained`.
absl::StatusOr<NamedTensors> ReadOptimizerState(const std::string& directory,
                                                const std::vector<ParameterRange>& wanted,
                                                const std::vector<std::string>& trained);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_OPTIMIZER_OPTIMIZER_STATE_H_
