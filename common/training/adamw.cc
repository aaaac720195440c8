#include "common/training/adamw.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace tandem::training {
namespace {

constexpr char kFirstMoment[] = ".exp_avg";
constexpr char kSecondMoment[] = ".exp_avg_sq";
constexpr char kSteps[] = "optimizer.steps";

}  // namespace

AdamW::AdamW(const NamedTensors& parameters, const OptimizerOptions& options)
    : options_(options), parameters_(parameters) {
  const at::NoGradGuard no_grad;
  groups_ = {{options.weight_decay, {}}, {0.0, {}}};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i].second;
    parameter = parameter.detach();
    exp_avg_.push_back(at::zeros_like(parameter));
    exp_avg_sq_.push_back(at::zeros_like(parameter));
    groups_[parameter.dim() >= 2 ? 0 : 1].members.push_back(i);
  }
}

void AdamW::Step(const std::vector<at::Tensor>& gradients, double learning_rate) {
  const at::NoGradGuard no_grad;
  ++steps_;
  const at::Tensor step = at::scalar_tensor(static_cast<double>(steps_), at::kFloat);
  for (const Group& group : groups_) {
    if (group.members.empty()) continue;
    std::vector<at::Tensor> parameters, grads, first, second;
    for (size_t i : group.members) {
      parameters.push_back(parameters_[i].second);
      grads.push_back(gradients[i]);
      first.push_back(exp_avg_[i]);
      second.push_back(exp_avg_sq_[i]);
    }
    const std::vector<at::Tensor> steps(parameters.size(), step);
    at::_fused_adamw_(parameters, grads, first, second, /*max_exp_avg_sqs=*/{}, steps,
                      learning_rate, options_.beta1, options_.beta2, group.weight_decay,
                      options_.epsilon, /*amsgrad=*/false, /*maximize=*/false);
  }
}

NamedTensors AdamW::State() const {
  NamedTensors state;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    state.emplace_back(parameters_[i].first + kFirstMoment, exp_avg_[i]);
    state.emplace_back(parameters_[i].first + kSecondMoment, exp_avg_sq_[i]);
  }
  state.emplace_back(kSteps, at::scalar_tensor(steps_, at::kLong));
  return state;
}

absl::Status AdamW::LoadState(const NamedTensors& state) {
  const at::NoGradGuard no_grad;
  const NamedTensors own = State();
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      return absl::DataLossError(absl::StrCat("optimizer state lacks tensor '", name, "'"));
    }
    if (found->second.sizes() != tensor.sizes() ||
        found->second.scalar_type() != tensor.scalar_type()) {
      return absl::DataLossError(
          absl::StrCat("optimizer state: tensor '", name, "' has another shape or type"));
    }
  }
  if (given.size() != own.size()) {
    return absl::DataLossError("optimizer state holds tensors of parameters that do not exist");
  }
  for (const auto& [name, tensor] : own) {
    if (name != kSteps) at::Tensor(tensor).copy_(given[name]);
  }
  steps_ = given[kSteps].item<int64_t>();
  return absl::OkStatus();
}

double GlobalNorm(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  double squares = 0;
  for (const at::Tensor& gradient : gradients) {
    const double norm = at::linalg_vector_norm(gradient).item<double>();
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

}  // namespace tandem::training
