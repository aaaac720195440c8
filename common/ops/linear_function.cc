#include "common/ops/linear_function.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/matrix_product.h"
#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Inside forward autograd is off, so that Linear means the kernel.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return Linear(x, weight);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor& dy = gradients[0];
    const variable_list saved = context->get_saved_variables();
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) dx = MatrixProduct(dy, saved[1]);
    if (context->needs_input_grad(1)) dw = MatrixProduct(dy.t(), saved[0]);
    return {dx, dw};
  }
};

}  // namespace

at::Tensor DifferentiableLinear(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias) {
  const at::Tensor y = LinearFunction::apply(x, weight);
  return bias.defined() ? y + bias : y;
}

}  // namespace tandem::ops
