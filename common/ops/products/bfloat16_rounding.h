// Weights with the values of bfloat16, in float32.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_BFLOAT16_ROUNDING_H_
#define TANDEM_COMMON_OPS_PRODUCTS_BFLOAT16_ROUNDING_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// Writes the values of `from`, rounded as packed weights in bfloat16 are
// (kernels::RoundToBfloat16), into `to`, which may be `from`. Both are contiguous, in float32 on
// the CPU, and of one shape. No autograd.
void CopyRounded(const at::Tensor& from, const at::Tensor& to);

// Returns the rounded values of x, float32 on the CPU. The gradient of the result is that of x, as
// if nothing had been rounded: the straight-through estimator, https://arxiv.org/abs/1308.3432.
at::Tensor Rounded(const at::Tensor& x);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_BFLOAT16_ROUNDING_H_
