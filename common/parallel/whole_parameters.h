// Functions that concern all parameters of a model, whichever ranks hold them.
#ifndef TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_
#define TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/strategy.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/weights/word_sums.h"

namespace tandem::parallel {

// Calls `use` on every rank with the source of the whole parameters that it wants, those for which
// `rank_of` names it (VisitParametersOn); `use` may call the source once. The visit takes place
// whether `use` calls the source or not. Ranks wait for each other without a time limit. An error
// of `use` on one rank is returned on all. Collective.
absl::Status UseParametersOn(Strategy& strategy,
                             absl::FunctionRef<int(const Parameter& parameter)> rank_of,
                             absl::FunctionRef<absl::Status(TensorSource parameters)> use);

// The same for rank 0, which alone calls `use`, with the whole parameters that are `wanted`.
absl::Status UseWholeParameters(Strategy& strategy,
                                absl::FunctionRef<bool(const Parameter& parameter)> wanted,
                                absl::FunctionRef<absl::Status(TensorSource parameters)> use);

// Returns WeightsDigest of the whole parameters, on every rank. Every rank reads values that it
// holds, each of them on one rank, and sends 16 bytes for each parameter. `frozen` keeps the sums
// of those that do not train from one call to the next; it must be empty after their values were
// replaced. Collective.
absl::StatusOr<std::string> ParametersDigest(Strategy& strategy, TensorSums& frozen);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_
