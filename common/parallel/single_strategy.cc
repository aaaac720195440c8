#include "common/parallel/single_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "common/base/status_macros.h"
#include "common/parallel/block_pass.h"
#include "common/parallel/optimizer_state.h"
#include "common/parallel/optimizer_step.h"
#include "common/tensor/catch_torch_errors.h"

namespace tandem::parallel {
namespace {

std::vector<StateSlice> WholeSlices(const NamedTensors& parameters) {
  std::vector<StateSlice> slices;
  for (const auto& [name, parameter] : parameters) {
    slices.push_back({.parameter = name,
                      .shape = parameter.sizes().vec(),
                      .offset = 0,
                      .numel = parameter.numel()});
  }
  return slices;
}

}  // namespace

absl::Status SingleStrategy::LoadModel(const std::string& directory, const LoadOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(model_, Model::Load(directory, options));
  return absl::OkStatus();
}

absl::Status SingleStrategy::BuildOptimizer(const OptimizerOptions& options) {
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    options_ = options;
    for (const auto& [name, parameter] : model_->Parameters()) {
      if (!parameter.requires_grad()) continue;
      parameters_.emplace_back(name, parameter);
      gradients_.push_back(at::zeros_like(parameter.detach()));
      parameter.mutable_grad() = gradients_.back();
    }
    if (parameters_.empty()) {
      return absl::InvalidArgumentError("no parameter of the model requires a gradient");
    }
    optimizer_ =
        std::make_unique<training::AdamW>(training::WholeParameters(parameters_), options_);
    return absl::OkStatus();
  });
}

at::Tensor SingleStrategy::Gradient(absl::string_view parameter) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].first == parameter) return gradients_[i];
  }
  return {};
}

absl::StatusOr<std::vector<std::vector<double>>> SingleStrategy::Forward(int64_t count,
                                                                         InputFunction input,
                                                                         OutputFunction output) {
  return ShareOut(count, [&](int64_t i) {
    const at::NoGradGuard no_grad;
    BlockPass pass(*model_, input(i));
    const at::Tensor hidden = pass.ForwardAll();
    return output(i, pass.batch(), hidden);
  });
}

absl::StatusOr<std::vector<std::vector<double>>> SingleStrategy::ShareOut(
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

absl::StatusOr<OptimizerReport> SingleStrategy::OptimizerStep() {
  return CatchTorchErrors("optimizer step", [&] {
    // Autograd adds in place, so the gradients are still the ones given to the parameters.
    return ClipAndUpdate(
        options_, optimizer_->steps(), training::GlobalNorm(gradients_), gradients_,
        [&](double learning_rate) { optimizer_->Step(gradients_, learning_rate); }, *model_);
  });
}

absl::Status SingleStrategy::ResetOptimizer() {
  return CatchTorchErrors("cannot reset the optimizer", [&] {
    optimizer_->Reset();
    return absl::OkStatus();
  });
}

absl::Status SingleStrategy::VisitParameters(TensorVisitor visit) {
  return CatchTorchErrors("visit of parameters", [&]() -> absl::Status {
    for (const auto& [name, parameter] : model_->Parameters()) {
      TANDEM_RETURN_IF_ERROR(visit(name, parameter.detach()));
    }
    return absl::OkStatus();
  });
}

absl::Status SingleStrategy::ScatterParameters(const NamedTensors& parameters) {
  return CatchTorchErrors("cannot replace parameters",
                          [&] { return model_->LoadParameters(parameters); });
}

absl::Status SingleStrategy::SaveOptimizer(const std::string& directory) {
  return WriteOptimizerState(directory, /*rank=*/0, /*ranks=*/1, WholeSlices(parameters_),
                             optimizer_->State());
}

absl::Status SingleStrategy::LoadOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot load the optimizer", [&]() -> absl::Status {
    std::vector<std::string> trained;
    for (const auto& [name, parameter] : parameters_) trained.push_back(name);
    TANDEM_ASSIGN_OR_RETURN(const NamedTensors state,
                            ReadOptimizerState(directory, WholeSlices(parameters_), trained));
    return optimizer_->LoadState(state);
  });
}

}  // namespace tandem::parallel
