#include "common/parallel/strategy.h"

#include "common/parallel/optimizer/sharded_optimizer.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::parallel {

int64_t Strategy::optimizer_steps() const { return optimizer().steps(); }

absl::Status Strategy::ResetOptimizer() {
  return CatchTorchErrors("cannot reset the optimizer", [&] {
    optimizer().Reset();
    return absl::OkStatus();
  });
}

absl::Status Strategy::SaveOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot save the optimizer", [&] { return optimizer().Save(directory); });
}

absl::StatusOr<OptimizerWriter> Strategy::CopyOptimizer(TensorCopies& copies) {
  return CatchTorchErrors("cannot copy the optimizer", [&] { return optimizer().Copy(copies); });
}

absl::Status Strategy::LoadOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot load the optimizer", [&] { return optimizer().Load(directory); });
}

}  // namespace tandem::parallel
