// What a token-level loss needs of rows of logits z, so that the logits need not be kept.
//
// A part of the vocabulary is a tile of columns, or the shard that a rank holds. Parts are merged:
// with m = max_j z_j, the online softmax (https://arxiv.org/abs/1805.02867) extended by the
// weighted sum, from which the entropy follows.
#ifndef TANDEM_COMMON_LOSS_ROW_STATISTICS_H_
#define TANDEM_COMMON_LOSS_ROW_STATISTICS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ops/tensor_parallel_group.h"

namespace tandem::loss {

// All of one shape: [N] rows, or [P, N] for several parts of the vocabulary.
struct RowStatistics {
  at::Tensor max;       // m
  at::Tensor sum;       // sum_j exp(z_j - m)
  at::Tensor weighted;  // sum_j exp(z_j - m) (z_j - m)
  at::Tensor label;     // z_y; 0 in a part that does not hold the label y
};

// Uninitialised, [parts, rows].
RowStatistics EmptyRowStatistics(int64_t parts, int64_t rows, const at::TensorOptions& options);

// Part `index` of [P, N], rows [begin, begin + count): a view.
RowStatistics PartOf(const RowStatistics& parts, int64_t index, int64_t begin, int64_t count);

// [P, N] -> [N], in float64: with M = max_p m_p,
//   sum = sum_p c_p sum_p and weighted = sum_p c_p (weighted_p + (m_p - M) sum_p), c_p = e^(m_p -
//   M).
RowStatistics MergeParts(const RowStatistics& parts);

// The same of the parts that the ranks of a group hold: of `rows` [N], merged statistics of this
// rank's part in float64, those of all; the same bits on every rank. One maximum and one sum.
RowStatistics MergeRanks(const RowStatistics& rows, ops::TensorParallelGroup& group);

// log softmax(z)_y and the entropy (nats) of softmax(z), of merged statistics.
at::Tensor LogProbs(const RowStatistics& rows);
at::Tensor Entropies(const RowStatistics& rows);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_ROW_STATISTICS_H_
