// Functions that need a model's whole parameters, whichever ranks hold them.
#ifndef TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_
#define TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/strategy.h"
#include "common/tensor/named_tensors.h"

namespace tandem::parallel {

// Calls `use` on rank 0 with the source of the whole parameters (Strategy::VisitParameters), which
// it may call once. The other ranks take part in the visit, which takes place whether `use` calls
// the source or not. An error of `use` is returned on all ranks. Collective.
absl::Status UseWholeParameters(Strategy& strategy,
                                absl::FunctionRef<absl::Status(TensorSource parameters)> use);

// Returns WeightsDigest of the whole parameters, on every rank. Collective.
absl::StatusOr<std::string> ParametersDigest(Strategy& strategy);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_WHOLE_PARAMETERS_H_
