#include "common/parallel/whole_parameters.h"

#include "common/base/status_macros.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/weights/weights_digest.h"

namespace tandem::parallel {

absl::Status UseWholeParameters(Strategy& strategy,
                                absl::FunctionRef<absl::Status(TensorSource parameters)> use) {
  absl::Status status;
  bool visited = false;
  if (strategy.ranks().rank() == 0) {
    status = CatchTorchErrors("use of the parameters", [&] {
      return use([&](TensorVisitor visit) {
        visited = true;
        return strategy.VisitParameters(visit);
      });
    });
  }
  // Rank 0 visits in any case: the other ranks wait in the visit.
  if (!visited) {
    const absl::Status taken_part =
        strategy.VisitParameters([&](const std::string&, const at::Tensor&) { return status; });
    if (status.ok()) status = taken_part;
  }
  return ranks::Agree(strategy.ranks(), status);
}

absl::StatusOr<std::string> ParametersDigest(Strategy& strategy) {
  std::string digest;
  TANDEM_RETURN_IF_ERROR(UseWholeParameters(strategy, [&](TensorSource parameters) -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(digest, WeightsDigest(parameters));
    return absl::OkStatus();
  }));
  return ranks::FromRankZero<std::string>(strategy.ranks(),
                                          [&] { return absl::StatusOr<std::string>(digest); });
}

}  // namespace tandem::parallel
