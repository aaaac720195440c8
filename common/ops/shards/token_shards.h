// Sequence parallelism (https://arxiv.org/abs/2205.05198): each rank computes norms and residuals
// for its own shard of the tokens, and linear maps for all tokens with its shard of a weight. These
// functions move hidden states between the two.
//
// With T tokens and n ranks, a rank's shard has ceil(T / n) rows; rank r's begins at row
// r ceil(T / n). Where n does not divide T, the last rows are padding. Values of padding are not
// used, and its gradients are zero.
#ifndef TANDEM_COMMON_OPS_SHARDS_TOKEN_SHARDS_H_
#define TANDEM_COMMON_OPS_SHARDS_TOKEN_SHARDS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem::ops {

// Returns the tokens [T, ...] of all ranks' shards [ceil(T / n), ...], the same on every rank.
// Backward: sums the gradients of the ranks, and gives each rank its shard of the sum.
at::Tensor GatherTokens(const at::Tensor& shard, int64_t tokens,
                        const std::shared_ptr<TensorParallelGroup>& group);

// Returns this rank's shard [ceil(T / n), ...] of the sum of the ranks' `partial` sums [T, ...].
// Backward: gathers the gradients of all shards.
at::Tensor ScatterSum(const at::Tensor& partial, const std::shared_ptr<TensorParallelGroup>& group);

// Returns `x`. Backward: divides the gradient by n. For a function of gathered tokens that every
// rank computes alike: the ranks' gradients then add up to the gradient, like those of sharded
// weights.
at::Tensor DivideGradient(const at::Tensor& x, const TensorParallelGroup& group);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_SHARDS_TOKEN_SHARDS_H_
