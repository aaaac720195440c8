// Matrix products of training's backward pass.
#ifndef TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_
#define TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// a [m, k] b [k, n] -> [m, n], on any device; either may be transposed. In fp32 on the CPU it runs
// on MKL where the build has it: the bits depend on the shape but not on the number of threads; a
// row's bits may depend on how many others there are (Linear's do not). No autograd.
at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_MATRIX_PRODUCT_H_
