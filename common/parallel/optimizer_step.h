// What the optimizer steps of all strategies have in common, wherever the gradients are.
#ifndef TANDEM_COMMON_PARALLEL_OPTIMIZER_STEP_H_
#define TANDEM_COMMON_PARALLEL_OPTIMIZER_STEP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/training/optimizer_options.h"

namespace tandem::parallel {

// Clips `gradients`, this process's, by the norm of all, which is `grad_norm`; calls `update`,
// which may throw; tells the model. `steps` were done before. Errors as Strategy::OptimizerStep.
absl::StatusOr<OptimizerReport> ClipAndUpdate(const OptimizerOptions& options, int64_t steps,
                                              double grad_norm,
                                              absl::Span<const at::Tensor> gradients,
                                              absl::FunctionRef<void(double learning_rate)> update,
                                              Model& model);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_OPTIMIZER_STEP_H_
