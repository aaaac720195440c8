// Sums over the ranks of a group that do not depend on what else is summed: for inference, where a
// row's numbers must not depend on what it was batched with.
#ifndef TANDEM_COMMON_OPS_RANK_SUM_H_
#define TANDEM_COMMON_OPS_RANK_SUM_H_

#include <ATen/core/Tensor.h>

#include "common/ops/tensor_parallel_group.h"

namespace tandem::ops {

// What every rank has of a sum [T, ...] -> the whole sum [T, ...], the same bits on every rank:
// added in the order of the ranks, in float32, and rounded once. (The ring of an all-reduce adds in
// an order that depends on where in the tensor a value lies.) One all-gather, with temporary memory
// of n [T, ...]. No autograd.
at::Tensor SumInRankOrder(const at::Tensor& partial, TensorParallelGroup& group);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_RANK_SUM_H_
