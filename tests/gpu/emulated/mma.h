// The products of CUDA's tensor cores, as far as the project's kernels use them: of 16 by 16
// matrices of bfloat16, with sums in float32. A lane has half a row of the outputs, and of the
// operands what these need. Found in place of CUDA's header.
#ifndef TANDEM_TESTS_GPU_EMULATED_MMA_H_
#define TANDEM_TESTS_GPU_EMULATED_MMA_H_

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/gpu/emulated/cuda_bf16.h"
#include "tests/gpu/emulated/cuda_runtime.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major };

inline constexpr int kSide = 16, kColumnsOfLane = 8;

inline int RowOfLane() { return static_cast<int>(threadIdx.x % 32) / 2; }
inline int ColumnOfLane() { return static_cast<int>(threadIdx.x) % 2 * kColumnsOfLane; }

template <typename Use, int m, int n, int k, typename Number, typename Layout = void>
struct fragment;

template <>
struct fragment<matrix_a, kSide, kSide, kSide, __nv_bfloat16, row_major> {
  float row[kSide];
};
template <>
struct fragment<matrix_b, kSide, kSide, kSide, __nv_bfloat16, col_major> {
  float columns[kColumnsOfLane][kSide];
};
template <>
struct fragment<accumulator, kSide, kSide, kSide, float> {
  float sums[kColumnsOfLane];
};

// CUDA wants matrices at multiples of 32 bytes, and their lines at multiples of 16.
template <typename Number>
void CheckMatrix(const Number* matrix, unsigned stride) {
  if (reinterpret_cast<uintptr_t>(matrix) % 32 == 0 && stride * sizeof(Number) % 16 == 0) return;
  std::fputs("emulated kernel: a matrix of a tensor core is not aligned\n", stderr);
  std::abort();
}

inline void load_matrix_sync(fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major>& a,
                             const __nv_bfloat16* matrix, unsigned stride) {
  CheckMatrix(matrix, stride);
  for (int i = 0; i < kSide; ++i) a.row[i] = __bfloat162float(matrix[RowOfLane() * stride + i]);
}

inline void load_matrix_sync(fragment<matrix_b, 16, 16, 16, __nv_bfloat16, col_major>& b,
                             const __nv_bfloat16* matrix, unsigned stride) {
  CheckMatrix(matrix, stride);
  for (int j = 0; j < kColumnsOfLane; ++j) {
    for (int i = 0; i < kSide; ++i) {
      b.columns[j][i] = __bfloat162float(matrix[(ColumnOfLane() + j) * stride + i]);
    }
  }
}

template <typename Fragment>
void fill_fragment(Fragment& fragment, float value) {
  for (float& sum : fragment.sums) sum = value;
}

template <typename Sums, typename A, typename B>
void mma_sync(Sums& sums, const A& a, const B& b, const Sums& before) {
  for (int j = 0; j < kColumnsOfLane; ++j) {
    float sum = before.sums[j];
    for (int i = 0; i < kSide; ++i) sum = std::fmaf(a.row[i], b.columns[j][i], sum);
    sums.sums[j] = sum;
  }
}

template <typename Sums>
void store_matrix_sync(float* matrix, const Sums& sums, unsigned stride, layout_t /*layout*/) {
  CheckMatrix(matrix, stride);
  for (int j = 0; j < kColumnsOfLane; ++j) {
    matrix[RowOfLane() * stride + ColumnOfLane() + j] = sums.sums[j];
  }
}

}  // namespace nvcuda::wmma

#endif  // TANDEM_TESTS_GPU_EMULATED_MMA_H_
