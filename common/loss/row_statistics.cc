#include "common/loss/row_statistics.h"

#include <ATen/ATen.h>

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

}  // namespace

RowStatistics MergeTiles(const RowStatistics& tiles) {
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

at::Tensor LogProbs(const RowStatistics& rows) { return rows.label - rows.max - rows.sum.log(); }

at::Tensor Entropies(const RowStatistics& rows) {
  return rows.sum.log() - rows.weighted / rows.sum;
}

}  // namespace tandem::loss
