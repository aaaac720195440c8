#include "common/ops/autograd_functions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/attention/aten_attention.h"
#include "common/ops/linear/saved_object.h"
#include "common/ops/ops.h"
#include "common/ops/threads/parallel_for.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Autograd is off in forward and backward, so the operations of ops.h call the kernels there.

// With n = x / sqrt(mean(x^2) + eps), y = n (weight + offset) and g = dy (weight + offset):
//   dx = (g - n mean(g n)) / sqrt(mean(x^2) + eps), dweight = sum of dy n over the vectors.
variable_list RmsNormGradients(const at::Tensor& dy_in, const at::Tensor& x_in,
                               const at::Tensor& weight, double eps, double offset,
                               bool weight_trains) {
  const int64_t width = weight.numel();
  const at::Tensor x = x_in.reshape({-1, width}).to(at::kFloat);
  const at::Tensor dy = dy_in.reshape({-1, width}).to(at::kFloat);
  const at::Tensor factor = weight.to(x_in.scalar_type()).to(at::kFloat) + offset;
  const at::Tensor inverse = (x.square().mean(1, /*keepdim=*/true) + eps).rsqrt_();
  const at::Tensor n = x * inverse, g = dy * factor;
  const at::Tensor dx = (g - n * (g * n).mean(1, /*keepdim=*/true)) * inverse;
  const at::Tensor dweight =
      weight_trains ? (dy * n).sum(0).to(weight.scalar_type()) : at::Tensor();
  return {dx.to(x_in.scalar_type()).view(x_in.sizes()), dweight, {}, {}};
}

at::Tensor GatedGradient(const at::Tensor& dy, const at::Tensor& gate_up,
                         kernels::GateActivation activation) {
  const at::Tensor gate = gate_up.narrow(1, 0, dy.size(1));
  const at::Tensor up = gate_up.narrow(1, dy.size(1), dy.size(1)), dy_up = dy * up;
  return activation == kernels::GateActivation::kSilu
             ? at::cat({at::silu_backward(dy_up, gate), dy * at::silu(gate)}, 1)
             : at::cat({at::gelu_backward(dy_up, gate, "tanh"), dy * at::gelu(gate, "tanh")}, 1);
}

class RmsNormFunction : public Function<RmsNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            double eps, double offset) {
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["offset"] = offset;
    return RmsNorm(x, weight, eps, offset);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    constexpr int64_t kRows = 64;  // of a chunk, which has its own sums by column
    const variable_list saved = context->get_saved_variables();
    if (!saved[0].is_cpu()) {
      return RmsNormGradients(
          gradients[0], saved[0], saved[1], context->saved_data["eps"].toDouble(),
          context->saved_data["offset"].toDouble(), context->needs_input_grad(1));
    }
    const int64_t width = saved[1].numel();
    const at::Tensor x = saved[0].reshape({-1, width}), dy = gradients[0].reshape({-1, width});
    const at::Tensor packed_x = x.contiguous(), packed_dy = dy.contiguous();
    const int64_t rows = x.size(0), chunks = (rows + kRows - 1) / kRows;
    at::Tensor dx = at::empty({rows, width}, x.options());
    at::Tensor dw = at::zeros({chunks, width}, x.options());
    ParallelFor(chunks, kRows * width, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = chunk * kRows * width;
        kernels::GetCpuKernels().rms_norm_backward(
            {packed_x.const_data_ptr<float>() + first, width, saved[1].const_data_ptr<float>(),
             packed_dy.const_data_ptr<float>() + first, width, dx.mutable_data_ptr<float>() + first,
             width, dw.mutable_data_ptr<float>() + chunk * width,
             std::min(kRows, rows - chunk * kRows), width,
             static_cast<float>(context->saved_data["eps"].toDouble()),
             static_cast<float>(context->saved_data["offset"].toDouble())});
      }
    });
    return {dx.view(saved[0].sizes()), dw.sum(0), {}, {}};
  }
};

class RotaryFunction : public Function<RotaryFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return RotaryEmbedding(x, cos, sin);
  }

  // The gradient of a rotation is the rotation by the opposite angle.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    return {RotaryEmbedding(gradients[0], saved[0], saved[1].neg()), {}, {}};
  }
};

class GatedFunction : public Function<GatedFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_up,
                            GateActivation activation) {
    context->save_for_backward({gate_up});
    context->saved_data["activation"] = static_cast<int64_t>(activation);
    return Gated(gate_up, activation);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor gate_up = context->get_saved_variables()[0].contiguous();
    const at::Tensor dy = gradients[0].contiguous();
    const auto activation = static_cast<GateActivation>(context->saved_data["activation"].toInt());
    if (!gate_up.is_cpu()) return {GatedGradient(dy, gate_up, activation), {}};
    at::Tensor dx = at::empty_like(gate_up);
    const int64_t width = dy.size(1);
    ParallelFor(dy.size(0), 8 * width, [&](int64_t begin, int64_t end) {
      const float* gate = gate_up.const_data_ptr<float>() + 2 * width * begin;
      float* d_gate = dx.mutable_data_ptr<float>() + 2 * width * begin;
      kernels::GetCpuKernels().gated_backward(
          {gate, gate + width, 2 * width, dy.const_data_ptr<float>() + width * begin, width, d_gate,
           d_gate + width, 2 * width, end - begin, width, activation});
    });
    return {dx, {}};
  }
};

class SoftCapFunction : public Function<SoftCapFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double soft_cap) {
    at::Tensor y = SoftCap(x.clone(at::MemoryFormat::Contiguous), soft_cap);
    context->save_for_backward({y});
    context->saved_data["soft_cap"] = soft_cap;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor y = context->get_saved_variables()[0];
    const at::Tensor t = y / context->saved_data["soft_cap"].toDouble();
    return {gradients[0] * (1 - t.square()), {}};
  }
};

class AttentionFunction : public Function<AttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::vector<int64_t>& offsets,
                            const AttentionScores& scores, const SequenceTables& tables) {
    context->save_for_backward({q, k, v});
    context->saved_data["offsets"] = offsets;
    context->saved_data["scores"] = SaveObject(std::make_shared<const AttentionScores>(scores));
    context->saved_data["tables"] = SaveObject(std::make_shared<const SequenceTables>(tables));
    return CausalAttention(q, k, v, offsets, scores, tables);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const AttentionGradients d = AtenCausalAttentionBackward(
        gradients[0], saved[0], saved[1], saved[2], context->saved_data["offsets"].toIntVector(),
        *SavedObject<const AttentionScores>(context->saved_data["scores"]),
        *SavedObject<const SequenceTables>(context->saved_data["tables"]));
    return {d.q, d.k, d.v, {}, {}, {}};
  }
};

}  // namespace

at::Tensor DifferentiableRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps,
                                 double offset) {
  return RmsNormFunction::apply(x, weight, eps, offset);
}

at::Tensor DifferentiableRotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return RotaryFunction::apply(x, cos, sin);
}

at::Tensor DifferentiableGated(const at::Tensor& gate_up, GateActivation activation) {
  return GatedFunction::apply(gate_up, activation);
}

at::Tensor DifferentiableSoftCap(const at::Tensor& x, double soft_cap) {
  return SoftCapFunction::apply(x, soft_cap);
}

at::Tensor DifferentiableAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const std::vector<int64_t>& offsets,
                                   const AttentionScores& scores, const SequenceTables& tables) {
  return AttentionFunction::apply(q, k, v, offsets, scores, tables);
}

}  // namespace tandem::ops
