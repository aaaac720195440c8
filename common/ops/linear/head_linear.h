// Linear maps of single heads: each head of a token is multiplied by a matrix of its own.
//
// As in ops.h, the CPU in fp32 runs batch-invariant kernels, with the same bits with and without
// autograd; everywhere else it is ATen. Matrices are contiguous in their last dimension, and may be
// views of a larger tensor.
#ifndef TANDEM_COMMON_OPS_LINEAR_HEAD_LINEAR_H_
#define TANDEM_COMMON_OPS_LINEAR_HEAD_LINEAR_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// In both, x [T, heads, in] or [T, heads * in]; the result has as many dimensions.

// weight [heads, out, in] -> x weight^T, [T, heads, out]. The rows of a head's matrix lie one after
// the other.
at::Tensor HeadLinear(const at::Tensor& x, const at::Tensor& weight);

// weight [heads, in, out] -> x weight, [T, heads, out].
at::Tensor TransposedHeadLinear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_HEAD_LINEAR_H_
