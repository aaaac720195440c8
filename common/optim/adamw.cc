#include "common/optim/adamw.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"

namespace tandem::training {
namespace {

// More than any training makes, and far below the overflow of the counter.
constexpr int64_t kMaxSteps = int64_t{1} << 53;

// Returns what is wrong with the numbers of a tensor of the right shape and type, or nullptr.
const char* Fault(const std::string& name, const at::Tensor& tensor) {
  if (name == kOptimizerSteps) {
    const auto steps = tensor.item<int64_t>();
    return steps < 0 || steps > kMaxSteps ? "is not a valid number of steps" : nullptr;
  }
  if (!at::isfinite(tensor).all().item<bool>()) return "holds a number that is not finite";
  const bool negative = absl::EndsWith(name, kSecondMoment) && tensor.lt(0).any().item<bool>();
  return negative ? "holds a negative second moment" : nullptr;
}

}  // namespace

AdamW::AdamW(std::vector<AdamWParameter> parameters, const OptimizerOptions& options)
    : options_(options), parameters_(std::move(parameters)) {
  const at::NoGradGuard no_grad;
  groups_ = {{true, {}}, {false, {}}};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& values = parameters_[i].values;
    values = values.detach();
    exp_avg_.push_back(at::zeros_like(values));
    exp_avg_sq_.push_back(at::zeros_like(values));
    groups_[parameters_[i].decays ? 0 : 1].members.push_back(i);
  }
}

void AdamW::Step(const std::vector<at::Tensor>& gradients, double learning_rate,
                 const OptimizerOptions& options) {
  const at::NoGradGuard no_grad;
  if (parameters_.empty()) return;
  const at::Tensor step = at::full({}, static_cast<double>(steps_ + 1),
                                   parameters_[0].values.options().dtype(at::kFloat));
  for (const Group& group : groups_) {
    if (group.members.empty()) continue;
    std::vector<at::Tensor> parameters, grads, first, second;
    for (size_t i : group.members) {
      parameters.push_back(parameters_[i].values);
      grads.push_back(gradients[i]);
      first.push_back(exp_avg_[i]);
      second.push_back(exp_avg_sq_[i]);
    }
    const std::vector<at::Tensor> steps(parameters.size(), step);
    at::_fused_adamw_(parameters, grads, first, second, /*max_exp_avg_sqs=*/{}, steps,
                      learning_rate, options.beta1, options.beta2,
                      group.decays ? options.weight_decay : 0.0, options.epsilon,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  ++steps_;
}

NamedTensors AdamW::State() const {
  NamedTensors state;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    state.emplace_back(parameters_[i].name + kFirstMoment, exp_avg_[i]);
    state.emplace_back(parameters_[i].name + kSecondMoment, exp_avg_sq_[i]);
  }
  state.emplace_back(kOptimizerSteps, at::scalar_tensor(steps_, at::kLong));
  return state;
}

absl::Status AdamW::CheckState(const NamedTensors& state) const {
  const at::NoGradGuard no_grad;
  const NamedTensors own = State();
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      return absl::DataLossError(absl::StrCat("optimizer state lacks tensor '", name,
                                              "': was that parameter frozen when it was saved?"));
    }
    if (found->second.numel() != tensor.numel() ||
        found->second.scalar_type() != tensor.scalar_type()) {
      return absl::DataLossError(
          absl::StrCat("optimizer state: tensor '", name, "' has a different shape or type"));
    }
    if (const char* const fault = Fault(name, found->second); fault != nullptr) {
      return absl::DataLossError(absl::StrCat("optimizer state: tensor '", name, "' ", fault));
    }
    given.erase(found);
  }
  if (!given.empty()) {
    return absl::DataLossError(absl::StrCat("optimizer state: tensor '", given.begin()->first,
                                            "' belongs to no parameter that trains here"));
  }
  return absl::OkStatus();
}

absl::Status AdamW::LoadState(const NamedTensors& state) {
  TANDEM_RETURN_IF_ERROR(CheckState(state));
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  for (const auto& [name, tensor] : State()) tensor.copy_(given.at(name).view_as(tensor));
  steps_ = given.at(kOptimizerSteps).item<int64_t>();
  return absl::OkStatus();
}

void AdamW::Reset() {
  const at::NoGradGuard no_grad;
  for (at::Tensor& moment : exp_avg_) moment.zero_();
  for (at::Tensor& moment : exp_avg_sq_) moment.zero_();
  steps_ = 0;
}

double GlobalNorm(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  if (gradients.empty()) return 0;
  // One copy to the host for all norms.
  const at::Tensor norms = at::stack(at::_foreach_norm(gradients)).to(at::kCPU, at::kDouble);
  double squares = 0;
  for (int64_t i = 0; i < norms.numel(); ++i) {
    const double norm = norms.const_data_ptr<double>()[i];
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

}  // namespace tandem::training
