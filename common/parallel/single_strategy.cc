#include "common/parallel/single_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/parallel/held_values.h"
#include "common/parallel/zero/block_pass.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::parallel {

absl::Status SingleStrategy::LoadModel(const std::string& directory, const LoadOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(model_, Model::Load(directory, options));
  return absl::OkStatus();
}

void SingleStrategy::AllocateGradients() {
  const std::vector<Parameter>& parameters = model_->DeclaredParameters();
  for (const Parameter& parameter : parameters) {
    if (!parameter.trainable || parameter.value.grad().defined()) continue;
    const bool all_train = std::ranges::all_of(parameters, [&](const Parameter& other) {
      return other.trainable || other.buffer != parameter.buffer;
    });
    if (all_train) {
      const auto buffer = static_cast<size_t>(parameter.buffer);
      gradients_.push_back(at::zeros_like(model_->BlockBuffers()[buffer]));
      ViewGradients(*model_, parameter.buffer, gradients_.back());
    } else {
      gradients_.push_back(at::zeros_like(parameter.value.detach()));
      parameter.value.mutable_grad() = gradients_.back();
    }
  }
}

absl::Status SingleStrategy::BuildOptimizer(const OptimizerOptions& options) {
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    AllocateGradients();
    std::vector<OptimizerShard> shards;
    for (const Parameter& parameter : model_->DeclaredParameters()) {
      if (!parameter.trainable) continue;
      const at::Tensor values = parameter.value.detach();
      shards.push_back({.range = {.parameter = parameter.spec.name,
                                  .shape = parameter.spec.shape,
                                  .numel = values.numel()},
                        .values = values,
                        .gradient = parameter.value.grad()});
    }
    TANDEM_ASSIGN_OR_RETURN(optimizer_,
                            ShardedOptimizer::Create(std::move(shards), options, *model_, alone_));
    return absl::OkStatus();
  });
}

at::Tensor SingleStrategy::Gradient(absl::string_view parameter) const {
  const at::Tensor found = model_->Parameter(parameter);
  return found.defined() ? found.grad() : at::Tensor();
}

absl::StatusOr<std::vector<std::vector<double>>> SingleStrategy::Forward(int64_t count,
                                                                         InputFunction input,
                                                                         OutputFunction output) {
  return ParallelMap(count, [&](int64_t i) {
    const at::NoGradGuard no_grad;
    BlockPass pass(*model_, input(i));
    const at::Tensor hidden = pass.ForwardAll();
    return output(i, pass.batch(), hidden);
  });
}

absl::StatusOr<std::vector<std::vector<double>>> SingleStrategy::ParallelMap(
    int64_t count, absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t)> compute) {
  std::vector<std::vector<double>> outputs;
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("forward", [&]() -> absl::Status {
    for (int64_t i = 0; i < count; ++i) {
      TANDEM_ASSIGN_OR_RETURN(outputs.emplace_back(), compute(i));
    }
    return absl::OkStatus();
  }));
  return outputs;
}

absl::Status SingleStrategy::ForwardBackward(int64_t count, InputFunction input,
                                             LossFunction loss) {
  return CatchTorchErrors("forward-backward", [&]() -> absl::Status {
    for (at::Tensor& gradient : gradients_) gradient.zero_();
    for (int64_t i = 0; i < count; ++i) {
      BlockPass pass(*model_, input(i), std::make_unique<CausalContext>(), recompute_);
      const at::Tensor hidden = pass.ForwardAll();
      TANDEM_ASSIGN_OR_RETURN(const at::Tensor gradient, loss(i, pass.batch(), hidden));
      pass.BackwardAll(gradient);
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<OptimizerReport> SingleStrategy::OptimizerStep(const OptimizerOverrides& overrides) {
  return CatchTorchErrors("optimizer step",
                          [&] { return optimizer_->Step(*model_, overrides, [] {}); });
}

std::vector<Holding> SingleStrategy::Holdings(const Parameter& parameter, int /*wanted_by*/) const {
  return {{.rank = 0, .range = WholeRange(parameter)}};
}

}  // namespace tandem::parallel
