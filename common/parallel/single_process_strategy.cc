#include "common/parallel/single_process_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/tensor/aten_bytes.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/training/learning_rate.h"

namespace tandem::parallel {

absl::Status SingleProcessStrategy::Build(const NamedTensors& parameters,
                                          const OptimizerOptions& options) {
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.is_leaf() || !parameter.requires_grad() ||
        parameter.scalar_type() != at::kFloat) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", name, "' is not an fp32 leaf that requires a gradient"));
    }
  }
  return CatchTorchErrors("cannot build the optimizer", [&]() -> absl::Status {
    options_ = options;
    parameters_ = parameters;
    gradients_.clear();
    for (const auto& [name, parameter] : parameters_) {
      gradients_.push_back(at::zeros_like(parameter.detach()));
      parameter.mutable_grad() = gradients_.back();
    }
    optimizer_ = std::make_unique<training::AdamW>(parameters_, options_);
    return absl::OkStatus();
  });
}

at::Tensor SingleProcessStrategy::Gradient(absl::string_view parameter) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].first == parameter) return gradients_[i];
  }
  return {};
}

absl::Status SingleProcessStrategy::ForwardBackward(int64_t count,
                                                    absl::FunctionRef<absl::Status(int64_t)> run) {
  return CatchTorchErrors("forward-backward", [&]() -> absl::Status {
    for (at::Tensor& gradient : gradients_) gradient.zero_();
    for (int64_t i = 0; i < count; ++i) {
      TANDEM_RETURN_IF_ERROR(run(i));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<OptimizerReport> SingleProcessStrategy::OptimizerStep() {
  OptimizerReport report;
  TANDEM_RETURN_IF_ERROR(CatchTorchErrors("optimizer step", [&]() -> absl::Status {
    // Autograd adds in place, so the gradients are still the ones given to the parameters.
    report.grad_norm = training::GlobalNorm(gradients_);
    if (!std::isfinite(report.grad_norm)) {
      return absl::InternalError("the gradient norm is not finite; nothing was applied");
    }
    const double factor = options_.max_grad_norm / (report.grad_norm + 1e-6);
    if (options_.max_grad_norm > 0 && factor < 1) at::_foreach_mul_(gradients_, factor);
    report.learning_rate = training::LearningRateAt(options_, optimizer_->steps());
    optimizer_->Step(gradients_, report.learning_rate);
    return absl::OkStatus();
  }));
  return report;
}

absl::StatusOr<NamedTensors> SingleProcessStrategy::GatherParameters() {
  NamedTensors parameters;
  for (const auto& [name, parameter] : parameters_) {
    parameters.emplace_back(name, parameter.detach());
  }
  return parameters;
}

absl::Status SingleProcessStrategy::ScatterParameters(const NamedTensors& parameters) {
  const std::map<std::string, at::Tensor> given(parameters.begin(), parameters.end());
  for (const auto& [name, parameter] : parameters_) {
    const auto found = given.find(name);
    if (found == given.end() || found->second.sizes() != parameter.sizes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", name, "' is missing or has another shape"));
    }
  }
  if (given.size() != parameters_.size()) {
    return absl::InvalidArgumentError("parameters that the model does not have");
  }
  return CatchTorchErrors("cannot replace parameters", [&]() -> absl::Status {
    const at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : parameters_) parameter.detach().copy_(given.at(name));
    return absl::OkStatus();
  });
}

absl::Status SingleProcessStrategy::SaveOptimizer(const std::string& directory) {
  return WriteNamedTensors(absl::StrCat(directory, "/", kOptimizerFile), optimizer_->State());
}

absl::Status SingleProcessStrategy::LoadOptimizer(const std::string& directory) {
  return CatchTorchErrors("cannot load the optimizer", [&]() -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(const NamedTensors state,
                            ReadNamedTensors(absl::StrCat(directory, "/", kOptimizerFile)));
    return optimizer_->LoadState(state);
  });
}

absl::StatusOr<std::unique_ptr<Strategy>> CreateStrategy(absl::string_view name) {
  if (name.empty() || name == "single") return std::make_unique<SingleProcessStrategy>();
  if (name == "zero" || name == "megatron") {
    return FieldError(absl::StatusCode::kUnimplemented, "strategy.name",
                      absl::StrCat("'", name, "' is not there yet; use 'single'"));
  }
  return InvalidField("strategy.name",
                      absl::StrCat("'", name, "' is none of single, zero, megatron"));
}

}  // namespace tandem::parallel
