// The optimizer's state in a checkpoint directory, in one file or one file a rank. Whatever layout
// wrote it, any other reads the parts that it needs.
//
// One file, optimizer.safetensors, holds whole tensors. Files optimizer-<rank>-of-<ranks> hold flat
// parts of them, or of their shards; each says in its metadata ("slices", JSON) which.
#ifndef TANDEM_COMMON_PARALLEL_OPTIMIZER_STATE_H_
#define TANDEM_COMMON_PARALLEL_OPTIMIZER_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/parameter.h"
#include "common/tensor/named_tensors.h"

namespace tandem::parallel {

// Consecutive values of a parameter or of a shard of it, or all of them.
struct StateSlice {
  std::string parameter;
  std::vector<int64_t> shape;  // of the whole parameter
  Shard shard = {};
  int64_t offset = 0;  // among the shard's values
  int64_t numel = 0;
};

// "<parameter>" of "<parameter>.exp_avg".
std::string ParameterOfState(absl::string_view tensor);

// Writes the state of `rank` of `ranks`: training::AdamW::State of parameters that are `slices`.
absl::Status WriteOptimizerState(const std::string& directory, int rank, int ranks,
                                 const std::vector<StateSlice>& slices, const NamedTensors& state);

// The state of `wanted`: tensors of their `numel` values, for training::AdamW::LoadState once they
// have its shapes. `trained` are the names of all parameters that train. DATA_LOSS names the tensor
// that is missing, in parts or altogether, or that belongs to none of `trained`.
absl::StatusOr<NamedTensors> ReadOptimizerState(const std::string& directory,
                                                const std::vector<StateSlice>& wanted,
                                                const std::vector<std::string>& trained);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_OPTIMIZER_STATE_H_
