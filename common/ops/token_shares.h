// The way of hidden states between the parts of a model that each rank computes for its own tokens
// (norms, residuals) and those that it computes for all tokens with its share of a weight: sequence
// parallelism (https://arxiv.org/abs/2205.05198).
//
// T tokens, n ranks: a rank's share is ceil(T / n) rows, rank r's from row r ceil(T / n) on. Where
// T does not divide, the last rows are padding that no token stands for. Their values go nowhere
// and their gradients are zero.
#ifndef TANDEM_COMMON_OPS_TOKEN_SHARES_H_
#define TANDEM_COMMON_OPS_TOKEN_SHARES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "common/ops/tensor_parallel_group.h"

namespace tandem::ops {

// The shares [ceil(T / n), ...] of all ranks -> [T, ...], the same on every rank. Backward: every
// rank brings the gradient of what it did with the result, and gets its share of their sum.
at::Tensor GatherTokens(const at::Tensor& share, int64_t tokens,
                        const std::shared_ptr<TensorParallelGroup>& group);

// What every rank has of a sum [T, ...] -> this rank's share [ceil(T / n), ...] of the sum.
// Backward: the gradients of all shares.
at::Tensor ScatterSum(const at::Tensor& partial, const std::shared_ptr<TensorParallelGroup>& group);

// `x` itself; backward: the gradient divided by n. For what every rank computes alike of gathered
// tokens: with it the gradients behind are parts whose sum is the gradient, as all others are.
at::Tensor ShareGradient(const at::Tensor& x, const TensorParallelGroup& group);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_TOKEN_SHARES_H_
