#include "common/ops/linear_function.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Inside forward and backward autograd is off, so that Linear means the kernel.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return Linear(x, weight);
  }

  // The kernel wants both operands with the summed index last.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor& dy = gradients[0];
    const variable_list saved = context->get_saved_variables();
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) dx = Linear(dy, saved[1].t().contiguous());
    if (context->needs_input_grad(1)) {
      dw = Linear(dy.t().contiguous(), saved[0].t().contiguous());
    }
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
