#include "common/ops/linear/head_linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether a head's matrix is stored output by output or input by input.
enum class Storage { kByOutput, kByInput };

// x [T, heads, in] or [T, heads * in] -> the same with `out`, on the kernels.
at::Tensor Multiply(const at::Tensor& x_in, const at::Tensor& weight, Storage storage) {
  constexpr int64_t kRowsPerItem = 32;  // so that threads divide a long prompt
  const at::Tensor x = x_in.stride(-1) == 1 ? x_in : x_in.contiguous();
  const bool by_output = storage == Storage::kByOutput;
  const int64_t rows = x.size(0), heads = weight.size(0);
  const int64_t in = weight.size(by_output ? 2 : 1), out = weight.size(by_output ? 1 : 2);
  const int64_t head_stride = x.dim() == 3 ? x.stride(1) : in;
  at::Tensor y = x.dim() == 3 ? EmptyOnCpu({rows, heads, out}) : EmptyOnCpu({rows, heads * out});
  const auto* const from = x.const_data_ptr<float>();
  const auto* const matrices = weight.const_data_ptr<float>();
  auto* const to = y.mutable_data_ptr<float>();
  const int64_t chunks = (rows + kRowsPerItem - 1) / kRowsPerItem;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / chunks, row = item % chunks * kRowsPerItem;
      const int64_t count = std::min(kRowsPerItem, rows - row);
      const float* const x_rows = from + row * x.stride(0) + head * head_stride;
      const float* const matrix = matrices + head * weight.stride(0);
      float* const y_rows = to + (row * heads + head) * out;
      const int64_t y_stride = heads * out;
      if (by_output) {
        kernels::GetCpuKernels().linear({x_rows, x.stride(0), matrix, /*bias=*/nullptr, y_rows,
                                         y_stride, count, in, /*out_begin=*/0, out,
                                         /*accumulate=*/false});
      } else {
        kernels::GetCpuKernels().transposed_linear(
            {x_rows, x.stride(0), matrix, weight.stride(1), y_rows, y_stride, count, in, out});
      }
    }
  };
  ParallelFor(heads * chunks, std::min(rows, kRowsPerItem) * in * out, run);
  return y;
}

at::Tensor InHeads(const at::Tensor& x, int64_t heads) {
  return x.dim() == 3 ? x : x.unflatten(1, {heads, x.size(1) / heads});
}

// Returns the product of the heads' matrices a[head]^T b[head], for a [T, heads, m] and
// b [T, heads, n]: [heads, m, n]. Each is computed on one thread.
at::Tensor SumOverTokens(const at::Tensor& a_in, const at::Tensor& b_in, int64_t heads) {
  const at::Tensor a = InHeads(a_in, heads), b = InHeads(b_in, heads);
  at::Tensor product = at::empty({heads, a.size(2), b.size(2)}, a.options());
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // a setting of this thread
    for (int64_t head = begin; head < end; ++head) {
      MatrixProductOnThread(product[head], a.select(1, head).t(), b.select(1, head));
    }
  });
  return product;
}

// Either storage is the other one's gradient by x.
class HeadLinearFunction : public torch::autograd::Function<HeadLinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            Storage storage) {
    context->save_for_backward({x, weight});
    context->saved_data["by_output"] = storage == Storage::kByOutput;
    return Multiply(x, weight, storage);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const bool by_output = context->saved_data["by_output"].toBool();
    const at::Tensor dy = gradients[0].stride(-1) == 1 ? gradients[0] : gradients[0].contiguous();
    variable_list result(3);
    if (context->needs_input_grad(0)) {
      result[0] = Multiply(dy, weight, by_output ? Storage::kByInput : Storage::kByOutput);
    }
    if (context->needs_input_grad(1)) {
      result[1] =
          by_output ? SumOverTokens(dy, x, weight.size(0)) : SumOverTokens(x, dy, weight.size(0));
    }
    return result;
  }
};

at::Tensor Map(const at::Tensor& x, const at::Tensor& weight, Storage storage) {
  const int64_t heads = weight.size(0), in = weight.size(storage == Storage::kByOutput ? 2 : 1);
  TORCH_CHECK(weight.dim() == 3 && (x.dim() == 3 ? x.size(1) == heads && x.size(2) == in
                                                 : x.dim() == 2 && x.size(1) == heads * in),
              "maps of heads: x ", x.sizes(), " against weight ", weight.sizes());
  if (!x.is_cpu() || x.scalar_type() != at::kFloat ||
      kernels::GetCpuKernels().transposed_linear == nullptr) {
    const at::Tensor matrices = storage == Storage::kByOutput ? weight.transpose(1, 2) : weight;
    const at::Tensor y = at::bmm(InHeads(x, heads).transpose(0, 1), matrices).transpose(0, 1);
    return x.dim() == 3 ? y : y.flatten(1);
  }
  TORCH_CHECK(
      weight.stride(2) == 1 && (storage == Storage::kByInput || weight.stride(1) == weight.size(2)),
      "maps of heads: the rows of a matrix must lie one after the other");
  if (at::GradMode::is_enabled()) return HeadLinearFunction::apply(x, weight, storage);
  return Multiply(x, weight, storage);
}

}  // namespace

at::Tensor HeadLinear(const at::Tensor& x, const at::Tensor& weight) {
  return Map(x, weight, Storage::kByOutput);
}

at::Tensor TransposedHeadLinear(const at::Tensor& x, const at::Tensor& weight) {
  return Map(x, weight, Storage::kByInput);
}

}  // namespace tandem::ops
