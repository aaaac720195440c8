// Matrix products of bf16 numbers on the tile registers of AMX, on one thread: far more operations
// a cycle than the vector registers have.
#ifndef TANDEM_COMMON_KERNELS_CPU_AMX_PRODUCT_H_
#define TANDEM_COMMON_KERNELS_CPU_AMX_PRODUCT_H_

#include <cstdint>

namespace tandem::kernels {

// product[i, j] (+)= sum_l a[i, l] b[l, j], i < m, j < n, l < k.
//
// Products are exact and are summed in float32. Numbers below 2^-126 count as 0.
//
// An entry's bits depend on its row of a, its column of b and k alone.
struct AmxProductArgs {
  const uint16_t*
      a;  // bf16; a[i, l] at a + i * a_row_stride + l * a_column_stride, in elements; one of the
  int64_t a_row_stride, a_column_stride;  // two is 1
  const uint16_t* b;
  int64_t b_row_stride, b_column_stride;
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
