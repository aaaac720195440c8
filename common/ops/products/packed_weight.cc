#include "common/ops/products/packed_weight.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/products/packed_memory.h"
#include "common/ops/products/parallel_linear.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem::ops {

bool PackedWeight::IsSupported() { return kernels::GetCpuKernels().packed_linear != nullptr; }

PackedWeight::PackedWeight(kernels::WeightFormat format, int64_t out, int64_t in)
    : memory_(AllocatePacked(kernels::PackedBytes(format, out, in))),
      matrix_{.format = format, .data = memory_.get(), .out = out, .in = in} {
  TORCH_CHECK(format != kernels::WeightFormat::kDense, "a dense matrix is not packed");
}

void PackedWeight::SetRows(int64_t first, const at::Tensor& values, PackThreads threads) const {
  TORCH_CHECK(values.dim() == 2 && values.size(1) == in() && values.is_floating_point(),
              "packed weight [", out(), ", ", in(), "]: rows ", values.sizes());
  const int64_t rows = values.size(0);
  TORCH_CHECK(first >= 0 && first + rows <= out(), "packed weight: ", rows, " rows from ", first,
              " on of ", out());
  const at::NoGradGuard no_grad;
  const int64_t chunks = (rows + kernels::kPanelOuts - 1) / kernels::kPanelOuts;
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t row = chunk * kernels::kPanelOuts;
      const int64_t count = std::min(kernels::kPanelOuts, rows - row);
      const at::Tensor some = values.narrow(0, row, count).to(at::kCPU, at::kFloat).contiguous();
      kernels::PackRows(matrix_, first + row, count, some.const_data_ptr<float>(), in());
    }
  };
  if (threads == PackThreads::kOne) return pack(0, chunks);
  at::parallel_for(0, chunks, /*grain_size=*/1, pack);
}

void PackedWeight::Swap(PackedWeight& other) {
  TORCH_CHECK(other.format() == format() && other.out() == out() && other.in() == in(),
              "packed weight [", out(), ", ", in(), "]: swapped with [", other.out(), ", ",
              other.in(), "], or with another format");
  std::swap(memory_, other.memory_);
  std::swap(matrix_, other.matrix_);
}

at::Tensor PackedWeight::Rows(const at::Tensor& rows) const {
  const at::Tensor indices = rows.to(at::kCPU, at::kLong).contiguous();
  const int64_t count = indices.numel();
  const auto* const index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(index[i] >= 0 && index[i] < out(), "row ", index[i], " of ", out());
  }
  at::Tensor values = EmptyOnCpu({count, in()});
  auto* const to = values.mutable_data_ptr<float>();
  ParallelFor(count, in(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels::UnpackRow(matrix_, index[i], to + i * in());
  });
  return values;
}

at::Tensor PackedWeight::Linear(const at::Tensor& x, const at::Tensor& bias, int64_t outs) const {
  at::Tensor y = EmptyOnCpu({x.size(0), outs});
  Multiply(x, bias, outs, y, /*accumulate=*/false);
  return y;
}

void PackedWeight::MultiplyTile(const LinearTile& tile, const float* x, float* y) const {
  kernels::GetCpuKernels().packed_linear({.x = x + tile.row_begin * in(),
                                          .x_stride = in(),
                                          .format = matrix_.format,
                                          .w = matrix_.data,
                                          .bias = nullptr,
                                          .y = y + tile.row_begin * out(),
                                          .y_stride = out(),
                                          .rows = tile.row_end - tile.row_begin,
                                          .in = in(),
                                          .out = out(),
                                          .panel_begin = tile.panel_begin,
                                          .panel_end = tile.panel_end,
                                          .accumulate = false});
}

at::Tensor PackedWeight::LinearAdd(const at::Tensor& residual, const at::Tensor& x,
                                   const at::Tensor& bias) const {
  Multiply(x, bias, out(), residual, /*accumulate=*/true);
  return residual;
}

void PackedWeight::Multiply(const at::Tensor& x_in, const at::Tensor& bias, int64_t outs,
                            const at::Tensor& y, bool accumulate) const {
  TORCH_CHECK(!at::GradMode::is_enabled(), "a packed weight has no gradient");
  TORCH_CHECK(IsSupported(), "packed weights need the CPU's own kernels");
  TORCH_CHECK(x_in.dim() == 2 && x_in.size(1) == in() && x_in.is_cpu() &&
                  x_in.scalar_type() == at::kFloat && outs >= 0 && outs <= out(),
              "linear: x ", x_in.sizes(), " against ", outs, " outputs of a packed weight [", out(),
              ", ", in(), "]");
  const at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  const kernels::PackedLinearArgs<float> whole = {
      .x = x.const_data_ptr<float>(),
      .x_stride = x.stride(0),
      .format = matrix_.format,
      .w = matrix_.data,
      .bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
      .y = y.mutable_data_ptr<float>(),
      .y_stride = y.stride(0),
      .rows = x.size(0),
      .in = in(),
      .out = outs,
      .panel_begin = 0,
      .panel_end = kernels::PanelCount(outs),
      .accumulate = accumulate};
  ParallelLinear(whole.rows, in(), outs, [&](const LinearTile& tile) {
    kernels::PackedLinearArgs<float> args = whole;
    args.x += tile.row_begin * whole.x_stride;
    args.y += tile.row_begin * whole.y_stride;
    args.rows = tile.row_end - tile.row_begin;
    args.panel_begin = tile.panel_begin;
    args.panel_end = tile.panel_end;
    kernels::GetCpuKernels().packed_linear(args);
  });
}

}  // namespace tandem::ops
