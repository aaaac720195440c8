// Batch-invariant sums over the ranks of a group.
#ifndef TANDEM_COMMON_OPS_SHARDS_RANK_SUM_H_
#define TANDEM_COMMON_OPS_SHARDS_RANK_SUM_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem::ops {

// Returns the sum [T, ...] of the ranks' `partial` sums [T, ...], with the same bits on every rank:
// it adds in the order of the ranks, in float32, and rounds once. (A ring all-reduce adds in an
// order that depends on the place of a value in the tensor.) Costs one all-gather and temporary
// memory of n [T, ...]. Backward: sums the gradients of the ranks, at the same cost.
at::Tensor SumInRankOrder(const at::Tensor& partial,
                          const std::shared_ptr<TensorParallelGroup>& group);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_SHARDS_RANK_SUM_H_
