#include "common/loss/logits/row_statistics.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <cmath>

#include "common/kernels/logit_blocks.h"

namespace tandem::loss {

RowStatistics EmptyRowStatistics(int64_t tiles, int64_t rows, const at::TensorOptions& options) {
  const at::Tensor all = at::empty({4, tiles, rows}, options);
  return {.max = all[0], .sum = all[1], .weighted = all[2], .label = all[3]};
}

RowStatistics RowsOf(const RowStatistics& tiles, int64_t tile, int64_t begin, int64_t count) {
  const auto rows = [&](const at::Tensor& x) { return x[tile].narrow(0, begin, count); };
  return {.max = rows(tiles.max),
          .sum = rows(tiles.sum),
          .weighted = rows(tiles.weighted),
          .label = rows(tiles.label)};
}

namespace {

// The two sums relative to another maximum, which is at least the rows' own.
struct RescaledSums {
  at::Tensor sum, weighted;
};

RescaledSums Rescaled(const RowStatistics& rows, const at::Tensor& max) {
  const at::Tensor below = rows.max - max, factor = below.exp();
  const at::Tensor sum = factor * rows.sum;
  return {.sum = sum, .weighted = factor * rows.weighted + below * sum};
}

RowStatistics MergeOnCpu(const RowStatistics& tiles) {
  const int64_t count = tiles.max.size(1), stride = tiles.max.stride(0);
  const at::Tensor merged = at::empty({3, count}, at::kDouble);
  auto* const numbers = merged.mutable_data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES(tiles.max.scalar_type(), "MergeTiles", [&] {
    const auto* const max = tiles.max.const_data_ptr<scalar_t>();
    const auto* const sum = tiles.sum.const_data_ptr<scalar_t>();
    const auto* const weighted = tiles.weighted.const_data_ptr<scalar_t>();
    for (int64_t row = 0; row < count; ++row) {
      const kernels::LogitRow whole =
          kernels::MergeBlocks(max + row, sum + row, weighted + row, tiles.max.size(0), stride);
      numbers[row] = whole.max;
      numbers[count + row] = whole.sum;
      numbers[2 * count + row] = whole.weighted;
    }
  });
  return {.max = merged[0],
          .sum = merged[1],
          .weighted = merged[2],
          .label = tiles.label.to(at::kDouble).sum(0)};
}

}  // namespace

RowStatistics MergeTiles(const RowStatistics& tiles) {
  if (tiles.max.is_cpu()) return MergeOnCpu(tiles);
  const at::Tensor max = tiles.max.to(at::kDouble).amax(0);
  const RescaledSums sums = Rescaled(tiles, max);
  return {.max = max,
          .sum = sums.sum.sum(0),
          .weighted = sums.weighted.sum(0),
          .label = tiles.label.to(at::kDouble).sum(0)};
}

RowStatistics MergeRanks(const RowStatistics& rows, ops::TensorParallelGroup& group) {
  const at::Tensor max = group.Max(rows.max);
  const RescaledSums sums = Rescaled(rows, max);
  const at::Tensor all = group.Sum(at::stack({sums.sum, sums.weighted, rows.label}));
  return {.max = max, .sum = all[0], .weighted = all[1], .label = all[2]};
}

RowLogProbs LogProbs(const RowStatistics& rows) {
  const at::Tensor host =
      at::stack({rows.max, rows.sum, rows.weighted, rows.label}).to(at::kCPU).contiguous();
  const int64_t count = host.size(1);
  const double* const max = host.const_data_ptr<double>();
  const double *const sum = max + count, *const weighted = sum + count,
                      *const label = weighted + count;
  RowLogProbs result;
  for (int64_t row = 0; row < count; ++row) {
    const kernels::LogitRow whole = {.max = max[row], .sum = sum[row], .weighted = weighted[row]};
    result.logprobs.push_back(kernels::LogProb(label[row], whole));
    result.entropies.push_back(std::log(whole.sum) - whole.weighted / whole.sum);
    result.num_greatest += label[row] == max[row];
  }
  return result;
}

}  // namespace tandem::loss
