#include "common/model/vision/vision_ops.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <numbers>

#include "common/ops/ops.h"
#include "common/ops/threads/parallel_for.h"

namespace tandem {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr float kQuickGeluSlope = 1.702F;
constexpr int64_t kExponentialWork = 8;  // in multiply-adds

// ATen computes the last values of a range with other instructions than the rest, and the ranges
// depend on the number of rows.
bool HasOwnLoop(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat &&
         ops::GetKernelPath() == ops::KernelPath::kAuto;
}

template <typename Activation>
at::Tensor OfEachValue(const at::Tensor& input, const Activation& activation) {
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  ops::ParallelFor(x.numel(), kExponentialWork, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = activation(from[i]);
  });
  return y;
}

struct GeluFunction : public Function<GeluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    if (!HasOwnLoop(x)) return at::gelu(x);
    constexpr float kHalfRoot = std::numbers::sqrt2_v<float> / 2;
    return OfEachValue(x, [](float v) { return 0.5F * v * (1 + std::erf(v * kHalfRoot)); });
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {at::gelu_backward(gradients[0], context->get_saved_variables()[0])};
  }
};

struct QuickGeluFunction : public Function<QuickGeluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    if (!HasOwnLoop(x)) return x * at::sigmoid(kQuickGeluSlope * x);
    return OfEachValue(x, [](float v) { return v / (1 + std::exp(-kQuickGeluSlope * v)); });
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor sigmoid = at::sigmoid(kQuickGeluSlope * x);
    return {gradients[0] * (sigmoid + kQuickGeluSlope * x * sigmoid * (1 - sigmoid))};
  }
};

// [count * length, heads, D] -> [count, heads, length, D], of memory of its own.
at::Tensor Segments(const at::Tensor& x, int64_t begin, int64_t count, int64_t length) {
  return x.narrow(0, begin, count * length)
      .unflatten(0, {count, length})
      .transpose(1, 2)
      .contiguous();
}

}  // namespace

at::Tensor Gelu(const at::Tensor& x) { return GeluFunction::apply(x); }

at::Tensor QuickGelu(const at::Tensor& x) { return QuickGeluFunction::apply(x); }

at::Tensor LayerNorm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     double eps) {
  const at::ScalarType type = x.scalar_type();
  return at::layer_norm(x, {x.size(-1)}, weight.to(type), bias.to(type), eps);
}

at::Tensor SegmentAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& lengths) {
  std::vector<at::Tensor> outputs;
  int64_t begin = 0;
  for (size_t i = 0; i < lengths.size();) {
    // Segments of one length that follow each other are one call.
    int64_t count = 1;
    while (i + count < lengths.size() && lengths[i + count] == lengths[i]) ++count;
    outputs.push_back(at::scaled_dot_product_attention(Segments(q, begin, count, lengths[i]),
                                                       Segments(k, begin, count, lengths[i]),
                                                       Segments(v, begin, count, lengths[i]))
                          .transpose(1, 2)
                          .flatten(2)
                          .flatten(0, 1));
    begin += count * lengths[i];
    i += static_cast<size_t>(count);
  }
  return at::cat(outputs, 0);
}

}  // namespace tandem
