// Whole parameters on the ranks that want them, from the ranks that hold their values
// (Strategy::Holdings). Values travel from rank to rank: nothing is gathered on ranks that do not
// want it.
#ifndef TANDEM_COMMON_PARALLEL_HELD_VALUES_H_
#define TANDEM_COMMON_PARALLEL_HELD_VALUES_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/parallel/strategy.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem::parallel {

// Returns the range of all values of a parameter.
ParameterRange WholeRange(const Parameter& parameter);

// Calls `visit` with every whole parameter, frozen ones included, on the rank that
// `rank_of(parameter)` says (a negative number: on none), in the order of Model::Parameters. A rank
// holds one whole parameter at a time. Ranks wait for each other without a time limit, so that
// `visit` may write to a slow disk. An error of `visit` on one rank is returned on all. Collective.
absl::Status VisitParametersOn(Strategy& strategy,
                               absl::FunctionRef<int(const Parameter& parameter)> rank_of,
                               TensorVisitor visit);

// Copies `from` to `to`, of the same shape, in transfers that health sees as progress: for mapped
// files on slow disks.
void CopyMapped(const at::Tensor& to, const at::Tensor& from);
// Whether all values of a mapped tensor are finite, read as CopyMapped does.
bool AllFinite(const at::Tensor& values);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_HELD_VALUES_H_
