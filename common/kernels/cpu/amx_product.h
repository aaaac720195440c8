// Matrix products on the tile registers of AMX, on one thread: far more operations a cycle than the
// vector registers have, with bf16 factors and float32 sums.
#ifndef TANDEM_COMMON_KERNELS_CPU_AMX_PRODUCT_H_
#define TANDEM_COMMON_KERNELS_CPU_AMX_PRODUCT_H_

#include <cstdint>

namespace tandem::kernels {

// product[i, j] (+)= sum_l a[i, l] b[l, j], i < m, j < n, l < k.
//
// Of bf16 factors the products are exact, and summed in float32. A float32 factor is taken apart
// into the sum of three bf16 numbers, which is exact, x = x0 + x1 + x2; of the nine products of two
// such sums the six largest are summed, the small ones first
// (https://arxiv.org/abs/1904.06376). What is left out is at most 2^-23 of |a b|, as much as
// rounding. Numbers below 2^-126 count as 0, and what is infinite may become NaN.
//
// An entry's bits depend on its row of a, its column of b and k alone.
struct AmxProductArgs {
  const void* a;  // a[i, l] at a + i * a_row_stride + l * a_column_stride, in elements; one of the
  int64_t a_row_stride, a_column_stride;  // two is 1
  const void* b;
  int64_t b_row_stride, b_column_stride;
  bool bfloat16;   // both factors, else float32
  float* product;  // rows are contiguous
  int64_t product_stride;
  int64_t m, n, k;
  bool accumulate;
};

using AmxProduct = void (*)(const AmxProductArgs&);

// Asks the kernel for the tile registers; nullptr when the build, the CPU or the kernel lacks them.
AmxProduct FindAmxProduct();

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CPU_AMX_PRODUCT_H_
