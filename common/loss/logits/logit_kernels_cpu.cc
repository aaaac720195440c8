#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>

#include <cmath>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/loss/logits/logit_kernels.h"
#include "common/ops/threads/parallel_for.h"

namespace tandem::loss {
namespace {

constexpr int64_t kWorkPerLogit = 16;  // in multiply-adds: about one exponential

const float* Data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; }
const float* From(const float* data, int64_t row) { return data == nullptr ? nullptr : data + row; }

template <typename Work>
void ForRows(const LogitTile& tile, const Work& work) {
  ops::ParallelFor(tile.logits.size(0), tile.logits.size(1) * kWorkPerLogit, work);
}

void Statistics(const LogitTile& tile, const RowStatistics& rows) {
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  const float* const logits = Data(tile.logits);
  const float* const scales = Data(tile.scales);
  const auto* const labels = tile.labels.const_data_ptr<int64_t>();
  auto* const max = rows.max.mutable_data_ptr<float>();
  auto* const sum = rows.sum.mutable_data_ptr<float>();
  auto* const weighted = rows.weighted.mutable_data_ptr<float>();
  auto* const label = rows.label.mutable_data_ptr<float>();
  const int64_t width = tile.logits.size(1);
  ForRows(tile, [&](int64_t begin, int64_t end) {
    cpu.logit_statistics({logits + begin * width, From(scales, begin), end - begin, width,
                          max + begin, sum + begin, weighted + begin});
    for (int64_t row = begin; row < end; ++row) {
      const int64_t column = labels[row] - tile.first_label;
      const bool inside = column >= 0 && column < width;
      const float scale = scales == nullptr ? 1.0f : scales[row];
      label[row] = inside ? logits[row * width + column] * scale : 0.0f;
    }
  });
}

void Gradient(const LogitTile& tile, const RowGradients& rows, at::ScalarType type) {
  const kernels::CpuKernels& cpu = kernels::GetCpuKernels();
  auto* const logits = tile.logits.mutable_data_ptr<float>();
  const float* const scales = Data(tile.scales);
  const auto* const labels = tile.labels.const_data_ptr<int64_t>();
  const float* const at_label = Data(rows.at_label);
  const int64_t width = tile.logits.size(1);
  const float *const max = Data(rows.max), *const constants = Data(rows.constants),
                     *const slopes = Data(rows.slopes);
  const bool bfloat16 = type == at::kBFloat16;
  const auto soft_cap = static_cast<float>(tile.soft_cap.value_or(0));
  ForRows(tile, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* const z = logits + row * width;
      const int64_t column = labels[row] - tile.first_label;
      const bool inside = column >= 0 && column < width;
      // Where the model is sure, the two terms nearly cancel: their sum is rounded once.
      float of_label = 0;
      if (inside) {
        const float d = z[column] * (scales == nullptr ? 1.0f : scales[row]) - max[row];
        of_label = std::exp(d) * (constants[row] + slopes[row] * d) + at_label[row];
        if (soft_cap > 0) of_label *= 1 - z[column] / soft_cap * (z[column] / soft_cap);
      }
      cpu.logit_gradient({z, From(scales, row), 1, width, max + row, constants + row, slopes + row,
                          bfloat16, soft_cap});
      if (!inside) continue;
      if (bfloat16) {
        reinterpret_cast<c10::BFloat16*>(z)[column] = of_label;
      } else {
        z[column] = of_label;
      }
    }
  });
}

int64_t ScratchBytes(int64_t /*tile_bytes*/) { return 0; }

}  // namespace

const LogitKernels kCpuLogitKernels = {Statistics, Gradient, ScratchBytes};

}  // namespace tandem::loss
