#include "common/parallel/optimizer_step.h"

#include <ATen/ATen.h>

#include <cmath>

#include "common/base/not_finite.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/training/learning_rate.h"

namespace tandem::parallel {

absl::StatusOr<OptimizerReport> ClipAndUpdate(const OptimizerOptions& options, int64_t steps,
                                              double grad_norm,
                                              absl::Span<const at::Tensor> gradients,
                                              absl::FunctionRef<void(double)> update,
                                              Model& model) {
  if (!std::isfinite(grad_norm)) return NotFiniteError("the gradient norm is not finite");
  const double factor = options.max_grad_norm / (grad_norm + 1e-6);
  if (options.max_grad_norm > 0 && factor < 1 && !gradients.empty()) {
    at::_foreach_mul_({gradients.data(), gradients.size()}, factor);
  }
  const OptimizerReport report = {.grad_norm = grad_norm,
                                  .learning_rate = training::LearningRateAt(options, steps)};
  const absl::Status updated = CatchTorchErrors("update", [&] {
    update(report.learning_rate);
    return absl::OkStatus();
  });
  if (!updated.ok()) return absl::DataLossError(updated.message());
  model.OnWeightsChanged();
  return report;
}

}  // namespace tandem::parallel
