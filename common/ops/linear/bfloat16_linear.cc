#include "common/ops/linear/bfloat16_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/products/parallel_linear.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem::ops {
namespace {

int64_t Even(int64_t width) { return width + width % 2; }

kernels::LinearArgs<uint16_t> WholeLinear(const at::Tensor& x, const at::Tensor& weight,
                                          const at::Tensor& bias, const at::Tensor& y,
                                          bool accumulate) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) &&
                  x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
                  x.stride(1) == 1 && weight.stride(1) == 1 &&
                  weight.stride(0) == Even(weight.size(1)),
              "linear in bfloat16: x ", x.sizes(), " against weight ", weight.sizes());
  return {.x = static_cast<const uint16_t*>(x.const_data_ptr()),
          .x_stride = x.stride(0),
          .w = static_cast<const uint16_t*>(weight.const_data_ptr()),
          .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
          .y = y.mutable_data_ptr<float>(),
          .y_stride = y.stride(0),
          .rows = x.size(0),
          .in = weight.stride(0),
          .out_begin = 0,
          .out_end = weight.size(0),
          .accumulate = accumulate};
}

}  // namespace

at::Tensor RoundedRows(const at::Tensor& x_in) {
  constexpr int64_t kOperations = 2;  // of a number
  TORCH_CHECK(x_in.dim() == 2 && x_in.is_cpu() && x_in.scalar_type() == at::kFloat,
              "rows to be rounded: ", x_in.sizes(), " of ", x_in.scalar_type());
  const at::NoGradGuard no_grad;
  const at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  const int64_t width = x.size(1), stride = Even(width);
  at::Tensor rounded = EmptyOnCpu({x.size(0), stride}, at::kBFloat16);
  const auto* const from = x.const_data_ptr<float>();
  auto* const to = static_cast<uint16_t*>(rounded.mutable_data_ptr());
  ParallelFor(x.size(0), kOperations * width, [&](int64_t begin, int64_t end) {
    kernels::GetCpuKernels().rounded_rows({.x = from + begin * x.stride(0),
                                           .x_stride = x.stride(0),
                                           .y = to + begin * stride,
                                           .y_stride = stride,
                                           .rows = end - begin,
                                           .width = width});
  });
  return width == stride ? rounded : Narrow(rounded, 1, 0, width);
}

at::Tensor Bfloat16Rows(int64_t rows, int64_t width) {
  return at::zeros({rows, Even(width)}, at::kBFloat16).narrow(1, 0, width);
}

at::Tensor Bfloat16Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  at::Tensor y = EmptyOnCpu({x.size(0), weight.size(0)});
  ParallelLinear(WholeLinear(x, weight, bias, y, /*accumulate=*/false),
                 kernels::GetCpuKernels().bfloat16_linear);
  return y;
}

at::Tensor Bfloat16LinearAdd(const at::Tensor& residual, const at::Tensor& x,
                             const at::Tensor& weight, const at::Tensor& bias) {
  ParallelLinear(WholeLinear(x, weight, bias, residual, /*accumulate=*/true),
                 kernels::GetCpuKernels().bfloat16_linear);
  return residual;
}

void Bfloat16LinearOnThread(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight) {
  kernels::GetCpuKernels().bfloat16_linear(
      WholeLinear(x, weight, /*bias=*/{}, y, /*accumulate=*/false));
}

}  // namespace tandem::ops
