#include "common/loss/row_statistics.h"

#include <ATen/ATen.h>

namespace tandem::loss {

RowStatistics EmptyRowStatistics(int64_t parts, int64_t rows, const at::TensorOptions& options) {
  const at::Tensor all = at::empty({4, parts, rows}, options);
  return {.max = all[0], .sum = all[1], .weighted = all[2], .label = all[3]};
}

RowStatistics PartOf(const RowStatistics& parts, int64_t index, int64_t begin, int64_t count) {
  const auto rows = [&](const at::Tensor& x) { return x[index].narrow(0, begin, count); };
  return {.max = rows(parts.max),
          .sum = rows(parts.sum),
          .weighted = rows(parts.weighted),
          .label = rows(parts.label)};
}

namespace {

// The sums as they are with a maximum that is not below the rows' own.
struct RescaledSums {
  at::Tensor sum, weighted;
};

RescaledSums Rescaled(const RowStatistics& rows, const at::Tensor& max) {
  const at::Tensor below = rows.max - max, factor = below.exp();
  const at::Tensor sum = factor * rows.sum;
  return {.sum = sum, .weighted = factor * rows.weighted + below * sum};
}

}  // namespace

RowStatistics MergeParts(const RowStatistics& parts) {
  const at::Tensor max = parts.max.to(at::kDouble).amax(0);
  const RescaledSums sums = Rescaled(parts, max);
  return {.max = max,
          .sum = sums.sum.sum(0),
          .weighted = sums.weighted.sum(0),
          .label = parts.label.to(at::kDouble).sum(0)};
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
