// Matrix products of training: the backward pass, the output layer.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_MATRIX_PRODUCT_H_
#define TANDEM_COMMON_OPS_PRODUCTS_MATRIX_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <vector>

namespace tandem::ops {

// Returns a b [m, n] for a [m, k] and b [k, n], on any device; either may be transposed. The
// product of bf16 factors is float32. On the CPU own kernels or MKL multiply
// (docs/internals/kernels.md). The bits depend on the shape but not on the number of threads; the
// bits of a row may depend on how many rows there are, unlike those of Linear. No autograd. Throws
// std::bad_alloc.
at::Tensor MatrixProduct(const at::Tensor& a, const at::Tensor& b);

// Writes a b into `product`, which is contiguous, or adds a b to it. Two bf16 factors may have a
// float32 product, to which they are then added in float32, on a GPU by the product itself.
void MatrixProductInto(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                       bool accumulate = false);

// A product that is written into `product`, as MatrixProductInto does.
struct Product {
  at::Tensor product, a, b;
  bool accumulate = false;
};

// Computes float32 products on the CPU that write to different memory; the threads divide all of
// them together. An empty product is left as it is.
void MatrixProducts(const std::vector<Product>& products);

// MatrixProductInto on the calling thread alone, for loops in which each thread has whole products.
void MatrixProductOnThread(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b,
                           bool accumulate = false);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_MATRIX_PRODUCT_H_
