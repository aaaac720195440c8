// How training is laid out over processes. Trainer and critic see only this interface; the same
// batch gives the same result under every strategy.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/model.h"
#include "common/tensor/named_tensors.h"
#include "common/training/optimizer_options.h"

namespace tandem::parallel {

// What an optimizer step did.
struct OptimizerReport {
  double grad_norm = 0;      // of the whole gradient, before clipping
  double learning_rate = 0;  // that was used
};

// Lifetime: Build once, then ForwardBackward and OptimizerStep by turns. Not thread-safe.
// Exceptions of libtorch become INTERNAL.
class Strategy {
 public:
  virtual ~Strategy() = default;

  // Takes over the training of `model`, which must outlive the strategy: the parameters that
  // require gradients, in place. INVALID_ARGUMENT for options that do not fit, or if nothing
  // trains.
  virtual absl::Status Build(Model& model, const OptimizerOptions& options) = 0;

  // The main gradient (fp32) of a parameter of this rank: autograd adds to it, and a fused output
  // loss may. Undefined if there is no such parameter, or if it is frozen.
  virtual at::Tensor Gradient(absl::string_view parameter) const = 0;

  // Zeroes the main gradients and calls `run(i)` for the micro-batches 0 .. count-1 of this rank,
  // in order. `run` does forward and backward with a loss that is already scaled for the *global*
  // batch (common/loss/loss_scale.h), so gradients simply add up. The first error ends it.
  virtual absl::Status ForwardBackward(int64_t count,
                                       absl::FunctionRef<absl::Status(int64_t)> run) = 0;

  // Clips by global norm with factor min(1, max_grad_norm / (norm + 1e-6)) and updates.
  // NotFiniteError, with nothing changed, for the norm. DATA_LOSS if the update broke off, with
  // some of the parameters changed. After any other error optimizer_steps() tells whether the
  // update was done; if so, the model's OnWeightsChanged may not have been.
  virtual absl::StatusOr<OptimizerReport> OptimizerStep() = 0;

  virtual int64_t optimizer_steps() const = 0;
  // Forgets every update: as after Build.
  virtual absl::Status ResetOptimizer() = 0;

  // Whole parameters, the frozen ones too, by name, on rank 0; views, valid until the next change.
  virtual absl::StatusOr<NamedTensors> GatherParameters() = 0;
  // Replaces parameters by whole ones. All or nothing; INVALID_ARGUMENT names the tensor.
  virtual absl::Status ScatterParameters(const NamedTensors& parameters) = 0;

  // Writes or reads the optimizer's state inside a checkpoint directory. DATA_LOSS names the tensor
  // that does not fit (the checkpoint of another model, or of another freeze); then nothing has
  // changed.
  virtual absl::Status SaveOptimizer(const std::string& directory) = 0;
  virtual absl::Status LoadOptimizer(const std::string& directory) = 0;
};

// The file of the optimizer's state in a checkpoint directory.
inline constexpr char kOptimizerFile[] = "optimizer.safetensors";

// By the name in the configuration, with the errors of CheckStrategyName.
absl::StatusOr<std::unique_ptr<Strategy>> CreateStrategy(absl::string_view name);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_H_
