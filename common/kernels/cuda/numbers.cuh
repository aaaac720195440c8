// Numbers of float32 and bfloat16 in memory, which kernels of this folder compute with in float32.
#ifndef TANDEM_COMMON_KERNELS_CUDA_NUMBERS_CUH_
#define TANDEM_COMMON_KERNELS_CUDA_NUMBERS_CUH_

#include <cuda_bf16.h>

#include <cstdint>

namespace tandem::kernels {

__device__ inline float Read(const float* x, int64_t i) { return x[i]; }
__device__ inline float Read(const __nv_bfloat16* x, int64_t i) { return __bfloat162float(x[i]); }
__device__ inline void Write(float* y, int64_t i, float value) { y[i] = value; }
__device__ inline void Write(__nv_bfloat16* y, int64_t i, float value) {
  y[i] = __float2bfloat16(value);
}

// The same for a type that is known when the kernel runs.
__device__ inline float Read(const void* x, int64_t i, bool bfloat16) {
  return bfloat16 ? Read(static_cast<const __nv_bfloat16*>(x), i)
                  : Read(static_cast<const float*>(x), i);
}
__device__ inline void Write(void* y, int64_t i, float value, bool bfloat16) {
  if (bfloat16) {
    Write(static_cast<__nv_bfloat16*>(y), i, value);
  } else {
    Write(static_cast<float*>(y), i, value);
  }
}

// Four numbers side by side, which one access reads or writes.
struct alignas(16) Four {
  float x[4];
};

template <typename Number>
struct alignas(4 * sizeof(Number)) FourInMemory {
  Number x[4];
};

// Returns x[i .. i + 3], of which those from `end` on are 0. An array whose `end` is a multiple of
// four begins at a multiple of four numbers, and so does i.
template <typename Number>
__device__ inline FourInMemory<Number> CopyFour(const Number* x, int i, int end) {
  if (end % 4 == 0) return *reinterpret_cast<const FourInMemory<Number>*>(x + i);
  FourInMemory<Number> four;
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) {
      four.x[j] = x[i + j];
    } else {
      Write(four.x, j, 0.0f);
    }
  }
  return four;
}

// The same, converted to float32.
template <typename Number>
__device__ inline Four ReadFour(const Number* x, int i, int end) {
  const auto read = CopyFour(x, i, end);
  Four four;
  for (int j = 0; j < 4; ++j) four.x[j] = Read(read.x, j);
  return four;
}

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_NUMBERS_CUH_
