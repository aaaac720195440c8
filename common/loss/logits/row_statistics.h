// Statistics of rows of logits z that a token-level loss needs, so that the logits need not be
// kept.
//
// The statistics of tiles of columns, and of the shards of ranks, are merged by the online softmax
// (common/kernels/logit_blocks.h).
#ifndef TANDEM_COMMON_LOSS_LOGITS_ROW_STATISTICS_H_
#define TANDEM_COMMON_LOSS_LOGITS_ROW_STATISTICS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/loss/logits/fused_output_loss.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem::loss {

// Four tensors of one shape: [N] for N rows, or [P, N] for the rows of P tiles.
struct RowStatistics {
  at::Tensor max;       // m = max_j z_j
  at::Tensor sum;       // sum_j exp(z_j - m)
  at::Tensor weighted;  // sum_j exp(z_j - m) (z_j - m)
  at::Tensor label;     // z_y; 0 where the columns do not include the label y
};

// Returns uninitialised statistics [tiles, rows].
RowStatistics EmptyRowStatistics(int64_t tiles, int64_t rows, const at::TensorOptions& options);

// Returns a view of the rows [begin, begin + count) of one of the tiles of [P, N].
RowStatistics RowsOf(const RowStatistics& tiles, int64_t tile, int64_t begin, int64_t count);

// Merges [P, N] into [N], in float64 (kernels::MergeBlocks, whose bits it has on the CPU).
RowStatistics MergeTiles(const RowStatistics& tiles);

// Merges the statistics of the ranks' shards in the same way. `rows` [N] are the merged statistics
// of this rank's shard, in float64. The result has the same bits on every rank. The ranks
// all-reduce one maximum and one sum.
RowStatistics MergeRanks(const RowStatistics& rows, ops::TensorParallelGroup& group);

// Returns log softmax(z)_y and the entropy of softmax(z), from merged statistics, and counts the
// rows with z_y = max. A GPU is waited for, once.
RowLogProbs LogProbs(const RowStatistics& rows);

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_ROW_STATISTICS_H_
