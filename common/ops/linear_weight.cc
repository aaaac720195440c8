#include "common/ops/linear_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "common/ops/matrix_product.h"
#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::vector<int64_t> Outs(at::TensorList weights) {
  std::vector<int64_t> outs;
  for (const at::Tensor& weight : weights) outs.push_back(weight.size(0));
  return outs;
}

// y_i = x W_i^T + b_i for stacked maps. Autograd sees the masters, the products use the copies.
class StackedLinear : public torch::autograd::Function<StackedLinear> {
 public:
  // What the products use is no input of the function: no gradient flows into it.
  struct Products {
    const at::Tensor &weight, &bias;
  };

  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               at::TensorList masters, at::TensorList biases,
                               const Products& products) {
    context->save_for_backward({x, products.weight});
    const std::vector<int64_t> outs = Outs(masters);
    context->saved_data["outs"] = outs;
    context->saved_data["has_bias"] = !biases.empty();
    return Linear(x, products.weight, products.bias).split_with_sizes(outs, 1);
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const std::vector<int64_t> outs = context->saved_data["outs"].toIntVector();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!dys[i].defined()) dys[i] = at::zeros({x.size(0), outs[i]}, x.options());
    }
    variable_list gradients(1 + outs.size() * (has_bias ? 2 : 1) + 1);
    if (context->needs_input_grad(0)) {
      const at::Tensor dy = dys.size() == 1 ? dys[0] : at::cat(dys, 1);
      gradients[0] = MatrixProduct(dy, weight);
    }
    for (size_t i = 0; i < outs.size(); ++i) {
      const size_t w = 1 + i, b = w + outs.size();
      if (context->needs_input_grad(w)) {
        gradients[w] = MatrixProduct(dys[i].to(at::kFloat).t(), x.to(at::kFloat));
      }
      if (has_bias && context->needs_input_grad(b)) {
        gradients[b] = dys[i].to(at::kFloat).sum(0);
      }
    }
    return gradients;
  }
};

}  // namespace

LinearWeight::LinearWeight(at::Tensor stacked, at::Tensor bias, std::vector<at::Tensor> weights,
                           std::vector<at::Tensor> biases, at::ScalarType compute_dtype)
    : stacked_(std::move(stacked)),
      bias_(std::move(bias)),
      weights_(std::move(weights)),
      biases_(std::move(biases)) {
  const at::NoGradGuard no_grad;
  // Where the types agree these are the stack itself.
  compute_weight_ = stacked_.detach().to(compute_dtype);
  if (bias_.defined()) compute_bias_ = bias_.detach().to(compute_dtype);
  has_copy_ = !compute_weight_.is_alias_of(stacked_);
  if (has_copy_) copied_version_ = stacked_._version();
}

void LinearWeight::OnWeightsChanged() {
  if (!has_copy_) return;
  const at::NoGradGuard no_grad;
  compute_weight_.copy_(stacked_);
  if (bias_.defined()) compute_bias_.copy_(bias_);
  copied_version_ = stacked_._version();
}

void LinearWeight::CheckFresh() const {
  TORCH_CHECK(!has_copy_ || copied_version_ == stacked_._version(),
              "the weights have changed and OnWeightsChanged() was not called");
}

const at::Tensor& LinearWeight::compute_weight() const {
  CheckFresh();
  return compute_weight_;
}

std::vector<at::Tensor> LinearWeight::ForwardAll(const at::Tensor& x) const {
  CheckFresh();
  if (at::GradMode::is_enabled()) {
    return StackedLinear::apply(x, at::TensorList(weights_), at::TensorList(biases_),
                                StackedLinear::Products{compute_weight_, compute_bias_});
  }
  return Linear(x, compute_weight_, compute_bias_).split_with_sizes(Outs(weights_), 1);
}

at::Tensor LinearWeight::Forward(const at::Tensor& x) const { return ForwardAll(x)[0]; }

at::Tensor LinearWeight::ForwardAdd(const at::Tensor& residual, const at::Tensor& x) const {
  if (at::GradMode::is_enabled()) return residual + Forward(x);
  CheckFresh();
  return LinearAdd(residual, x, compute_weight_, compute_bias_);
}

}  // namespace tandem::ops
