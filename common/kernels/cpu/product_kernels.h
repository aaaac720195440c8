// Matrix products on one thread; common/ops splits the work. Each is for CPUs on which it is faster
// than what libtorch multiplies with: common/ops/matrix_product.cc chooses.
#ifndef TANDEM_COMMON_KERNELS_CPU_PRODUCT_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CPU_PRODUCT_KERNELS_H_

#include <cstdint>

namespace tandem::kernels {

// product[i, j] (+)= sum_l a[i, l] b[l, j], i < m, j < n, l < k, summed in float32. `Number` is
// float, or uint16_t for bf16; of bf16, numbers below 2^-126 count as 0.
//
// An entry's bits depend on its row of a, its column of b and k alone.
template <typename Number>
struct ProductArgs {
  const Number*
      a;  // a[i, l] at a + i * a_row_stride + l * a_column_stride, in elements; one of the
  int64_t a_row_stride, a_column_stride;  // two is 1
  const Number* b;
  int64_t b_row_stride, b_column_stride;
  float* product;  // rows are contiguous
  int64_t product_stride;
  int64_t m, n, k;
  bool accumulate;
};

using FloatProduct = void (*)(const ProductArgs<float>&);
using Bfloat16Product = void (*)(const ProductArgs<uint16_t>&);

// "avx512"; nullptr when the build or the CPU lacks it.
FloatProduct FindFloatProduct(const char* isa);

// "amx", the tile registers, which the operating system grants a process that asks for them, or
// "avx512_bf16"; nullptr when the build, the CPU or the operating system lacks it.
Bfloat16Product FindBfloat16Product(const char* isa);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_PRODUCT_KERNELS_H_
