// Matrix products of training: the backward pass, the output layer.
#ifndef TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_
#define TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// a [m, k] b [k, n] -> [m, n], float32 of bf16 factors, on any device; either may be transposed. On
// the CPU it runs on own kernels or on MKL, by what the CPU has: the bits depend on the shape but
// not on the number of threads; a row's bits may depend on how many others there are (Linear's do
// not). No autograd.
at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b);

// The same into `product`, contiguous, or added to what it holds. Two bf16 factors may have a
// float32 product, to which the CPU adds in float32 whatever it multiplies with.
void MatrixProductInto(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                       bool accumulate = false);

// The same on the calling thread alone, for loops that share out whole products among the threads.
void MatrixProductOnThread(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                           bool accumulate = false);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_
