// Linear maps whose inputs are rounded to bf16, with float32 sums, on the CPU's own kernels.
//
// The order of a sum is that of kernels::LinearArgs<uint16_t>: a row's bits depend on that row
// alone, and are those of PackedWeight with the same values in kBfloat16. No autograd.
#ifndef TANDEM_COMMON_OPS_LINEAR_BFLOAT16_LINEAR_H_
#define TANDEM_COMMON_OPS_LINEAR_BFLOAT16_LINEAR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem::ops {

// Returns x [T, in], float32, rounded to the nearest bf16 (ties to even). Rows begin at even
// distances, and a 0 follows an odd one.
at::Tensor RoundedRows(const at::Tensor& x);

// Returns a matrix [rows, width] of bf16 zeros whose rows begin so, for a weight.
at::Tensor Bfloat16Rows(int64_t rows, int64_t width);

// In the following, x [T, in] is of RoundedRows and weight [out, in] of Bfloat16Rows, or rows of
// it.

// Returns x weight^T + bias [T, out] in float32; bias [out] is float32 or undefined.
at::Tensor Bfloat16Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Adds the same to `residual` [T, out] in place, and returns that.
at::Tensor Bfloat16LinearAdd(const at::Tensor& residual, const at::Tensor& x,
                             const at::Tensor& weight, const at::Tensor& bias);

// Writes x weight^T into y [T, out], contiguous, on the calling thread alone.
void Bfloat16LinearOnThread(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_BFLOAT16_LINEAR_H_
