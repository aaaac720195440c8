#include "common/ops/products/packed_weight.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/ops/products/matrix_product.h"
#include "common/ops/products/packed_memory.h"
#include "common/ops/products/parallel_linear.h"
#include "common/ops/threads/parallel_for.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem::ops {
namespace {

// Returns the most panels of `in` inputs that are widened at a time: some MiB of float32, and on
// one of several threads less.
int64_t WidenedPanels(int64_t in, PackThreads threads) {
  const int64_t values = threads == PackThreads::kOne ? 1 << 18 : 1 << 20;
  constexpr int64_t kLeast = 4;  // fewer make products that are slow
  return std::max(kLeast, values / (kernels::kPanelOuts * std::max<int64_t>(in, 1)));
}

}  // namespace

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
  const bool keeps_bits =
      format() == kernels::WeightFormat::kBfloat16 && values.scalar_type() == at::kBFloat16;
  const at::ScalarType type = keeps_bits ? at::kBFloat16 : at::kFloat;
  const int64_t chunks = (rows + kernels::kPanelOuts - 1) / kernels::kPanelOuts;
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t row = chunk * kernels::kPanelOuts;
      const int64_t count = std::min(kernels::kPanelOuts, rows - row);
      const at::Tensor some = values.narrow(0, row, count).to(at::kCPU, type).contiguous();
      if (type == at::kBFloat16) {
        kernels::PackBfloat16Rows(matrix_, first + row, count,
                                  static_cast<const uint16_t*>(some.const_data_ptr()), in());
      } else {
        kernels::PackRows(matrix_, first + row, count, some.const_data_ptr<float>(), in());
      }
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

template <typename Number>
kernels::PackedLinearArgs<Number> PackedWeight::Whole(const at::Tensor& x, const at::Tensor& bias,
                                                      int64_t outs, const at::Tensor& y,
                                                      bool accumulate) const {
  return {.x = static_cast<const Number*>(x.const_data_ptr()),
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
}

void PackedWeight::MultiplyTile(const LinearTile& tile, const at::Tensor& x,
                                const at::Tensor& y) const {
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  if (x.scalar_type() == at::kBFloat16) {
    return cpu.bfloat16_packed_linear(
        TileOf(Whole<uint16_t>(x, {}, out(), y, /*accumulate=*/false), tile));
  }
  cpu.packed_linear(TileOf(Whole<float>(x, {}, out(), y, /*accumulate=*/false), tile));
}

void PackedWeight::LinearInto(const at::Tensor& y, const at::Tensor& x, int64_t first,
                              PackThreads threads) const {
  const int64_t count = y.size(1);
  TORCH_CHECK(!at::GradMode::is_enabled() && IsSupported() && y.is_contiguous() &&
                  x.stride(1) == 1 && x.scalar_type() == at::kFloat && x.size(0) == y.size(0) &&
                  x.size(1) == in() && first >= 0 && first + count <= out(),
              "linear: x ", x.sizes(), ", y ", y.sizes(), ", outputs from ", first,
              " on of a packed weight [", out(), ", ", in(), "]");
  // The kernel begins with a panel.
  const int64_t panel = first / kernels::kPanelOuts, before = first % kernels::kPanelOuts;
  const at::Tensor whole = before == 0 ? y : at::empty({y.size(0), before + count}, y.options());
  const auto* const panels =
      static_cast<const char*>(matrix_.data) + panel * kernels::PanelBytes(matrix_.format, in());
  auto args = Whole<float>(x, /*bias=*/{}, whole.size(1), whole, /*accumulate=*/false);
  args.w = panels;
  auto* const kernel = kernels::GetCpuKernels().packed_linear;
  if (threads == PackThreads::kOne) {
    kernel(args);
  } else {
    ParallelLinear(args, kernel);
  }
  if (before > 0) y.copy_(whole.narrow(1, before, count));
}

void PackedWeight::InputGradientInto(const at::Tensor& dx, const at::Tensor& dy, int64_t first,
                                     bool accumulate, PackThreads threads) const {
  const int64_t end = first + dy.size(1);
  TORCH_CHECK(!at::GradMode::is_enabled() && IsSupported() && dx.is_contiguous() &&
                  dx.size(1) == in() && dx.size(0) == dy.size(0) && first >= 0 && end <= out() &&
                  dx.scalar_type() == at::kFloat && dy.scalar_type() == at::kFloat,
              "gradient dx ", dx.sizes(), " of dy ", dy.sizes(), ", outputs from ", first,
              " on of a packed weight [", out(), ", ", in(), "]");
  if (dy.size(1) == 0 && !accumulate) dx.zero_();
  const int64_t begin_panel = first / kernels::kPanelOuts, end_panel = kernels::PanelCount(end);
  const int64_t most = WidenedPanels(in(), threads);
  at::Tensor widened;  // [in, outputs]
  for (int64_t panel = begin_panel; panel < end_panel && dx.numel() > 0; panel += most) {
    const int64_t panels = std::min(most, end_panel - panel), width = panels * kernels::kPanelOuts;
    if (!widened.defined() || widened.size(1) != width) {
      widened.reset();  // before there is another one
      widened = at::empty({in(), width}, dx.options());
    }
    auto* const to = widened.mutable_data_ptr<float>();
    const auto unpack = [&](int64_t begin, int64_t finish) {
      kernels::GetCpuKernels().unpack({.format = matrix_.format,
                                       .w = matrix_.data,
                                       .in = in(),
                                       .panel_begin = panel + begin,
                                       .panel_end = panel + finish,
                                       .to = to + begin * kernels::kPanelOuts,
                                       .to_stride = width});
    };
    if (threads == PackThreads::kOne) {
      unpack(0, panels);
    } else {
      ParallelFor(panels, kernels::kPanelOuts * in(), unpack);
    }
    // The outputs of the block that were asked for.
    const int64_t block = panel * kernels::kPanelOuts;
    const int64_t from = std::max(first, block), count = std::min(end, block + width) - from;
    const at::Tensor columns = dy.narrow(1, from - first, count),
                     weights = widened.narrow(1, from - block, count).t();
    (threads == PackThreads::kOne ? MatrixProductOnThread : MatrixProductInto)(
        dx, columns, weights, accumulate || from > first);
  }
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
  const bool rounded = x_in.scalar_type() == at::kBFloat16;
  TORCH_CHECK(!rounded || format() == kernels::WeightFormat::kBfloat16,
              "inputs in bfloat16 need weights packed in bfloat16");
  TORCH_CHECK(x_in.dim() == 2 && x_in.size(1) == in() && x_in.is_cpu() &&
                  (rounded || x_in.scalar_type() == at::kFloat) && outs >= 0 && outs <= out(),
              "linear: x ", x_in.sizes(), " against ", outs, " outputs of a packed weight [", out(),
              ", ", in(), "]");
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  if (rounded) {
    return ParallelLinear(Whole<uint16_t>(x_in, bias, outs, y, accumulate),
                          cpu.bfloat16_packed_linear);
  }
  const at::Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  ParallelLinear(Whole<float>(x, bias, outs, y, accumulate), cpu.packed_linear);
}

}  // namespace tandem::ops
