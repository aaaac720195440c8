#include "common/parallel/whole_parameters.h"

#include "common/base/status_macros.h"
#include "common/parallel/held_values.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/weights/weights_digest.h"

namespace tandem::parallel {

absl::Status UseParametersOn(Strategy& strategy, absl::FunctionRef<int(const Parameter&)> rank_of,
                             absl::FunctionRef<absl::Status(TensorSource parameters)> use) {
  bool visited = false;
  absl::Status status = CatchTorchErrors("use of the parameters", [&] {
    return use([&](TensorVisitor visit) {
      visited = true;
      return VisitParametersOn(strategy, rank_of, visit);
    });
  });
  // This rank visits in any case: the other ranks wait in the visit.
  if (!visited) {
    const absl::Status taken_part = VisitParametersOn(
        strategy, rank_of, [&](const std::string&, const at::Tensor&) { return status; });
    if (status.ok()) status = taken_part;
  }
  return ranks::Agree(*strategy.ranks().patient(), status);
}

absl::Status UseWholeParameters(Strategy& strategy,
                                absl::FunctionRef<absl::Status(TensorSource parameters)> use) {
  return UseParametersOn(
      strategy, [](const Parameter&) { return 0; },
      [&](TensorSource parameters) {
        return strategy.ranks().rank() == 0 ? use(parameters) : absl::OkStatus();
      });
}

absl::StatusOr<std::string> ParametersDigest(Strategy& strategy) {
  std::string digest;
  TANDEM_RETURN_IF_ERROR(UseWholeParameters(strategy, [&](TensorSource parameters) -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(digest, WeightsDigest(parameters));
    return absl::OkStatus();
  }));
  return ranks::FromRankZero<std::string>(*strategy.ranks().patient(),
                                          [&] { return absl::StatusOr<std::string>(digest); });
}

}  // namespace tandem::parallel
