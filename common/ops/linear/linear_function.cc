#include "common/ops/linear/linear_function.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "common/ops/linear/bfloat16_linear.h"
#include "common/ops/linear/saved_object.h"
#include "common/ops/ops.h"
#include "common/ops/products/matrix_product.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns a b in `type`, accumulated in float32.
at::Tensor Product(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  if (a.is_cpu()) return MatrixProduct(a, b).to(type);
  return a.scalar_type() == type ? at::mm(a, b) : at::mm(a, b, type);
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  // The stacked maps. A struct is no input to autograd, so no gradient flows into them.
  struct Stack {
    const at::Tensor &weight, &bias;
  };

  // Autograd is off here, so Linear calls the kernel.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList masters,
                            at::TensorList bias_masters, const Stack& stack) {
    const bool rounds =
        x.scalar_type() == at::kFloat && stack.weight.scalar_type() == at::kBFloat16;
    const at::Tensor input = rounds ? RoundedRows(x) : x;
    context->save_for_backward({input, stack.weight});
    std::vector<int64_t> outs;
    for (const at::Tensor& master : masters) outs.push_back(master.size(0));
    context->saved_data["outs"] = outs;
    context->saved_data["has_bias"] = !bias_masters.empty();
    return rounds ? Bfloat16Linear(input, stack.weight, stack.bias)
                  : Linear(x, stack.weight, stack.bias);
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], dy = dys[0].to(weight.scalar_type());
    const std::vector<int64_t> outs = context->saved_data["outs"].toIntVector();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    // One entry per argument: x, the masters, the masters of the biases, the stack.
    variable_list gradients(1 + outs.size() * (has_bias ? 2 : 1) + 1);
    if (context->needs_input_grad(0)) gradients[0] = Product(dy, weight, dys[0].scalar_type());
    int64_t begin = 0;
    for (size_t i = 0; i < outs.size(); begin += outs[i++]) {
      const at::Tensor columns = dy.narrow(1, begin, outs[i]);
      const size_t w = 1 + i, b = w + outs.size();
      if (context->needs_input_grad(w)) gradients[w] = Product(columns.t(), x, at::kFloat);
      if (has_bias && context->needs_input_grad(b)) {
        gradients[b] = dys[0].narrow(1, begin, outs[i]).sum(0, /*keepdim=*/false, at::kFloat);
      }
    }
    return gradients;
  }
};

class PackedLinearFunction : public torch::autograd::Function<PackedLinearFunction> {
 public:
  using Weight = std::shared_ptr<const PackedWeight>;
  // A struct is no input to autograd, so no gradient flows into the bias.
  struct Maps {
    const Weight& weight;
    const at::Tensor& bias;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Maps& maps) {
    context->saved_data["weight"] = SaveObject(maps.weight);
    return maps.weight->Linear(x, maps.bias, maps.weight->out());
  }

  static variable_list backward(AutogradContext* context, variable_list dys) {
    const Weight weight = SavedObject<const PackedWeight>(context->saved_data["weight"]);
    const at::Tensor dy = dys[0].contiguous();
    const at::Tensor dx = at::empty({dy.size(0), weight->in()}, dy.options());
    weight->InputGradientInto(dx, dy, /*first=*/0, /*accumulate=*/false);
    return {dx, {}};
  }
};

}  // namespace

at::Tensor DifferentiableLinear(const at::Tensor& x,
                                const std::shared_ptr<const PackedWeight>& weight,
                                const at::Tensor& bias) {
  return PackedLinearFunction::apply(x, PackedLinearFunction::Maps{weight, bias});
}

at::Tensor DifferentiableLinear(const at::Tensor& x, at::TensorList masters,
                                at::TensorList bias_masters, const at::Tensor& weight,
                                const at::Tensor& bias) {
  return LinearFunction::apply(x, masters, bias_masters, LinearFunction::Stack{weight, bias});
}

}  // namespace tandem::ops
