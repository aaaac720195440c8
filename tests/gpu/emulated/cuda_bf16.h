// CUDA's bfloat16, as far as the project's kernels use it.
#ifndef TANDEM_TESTS_GPU_EMULATED_CUDA_BF16_H_
#define TANDEM_TESTS_GPU_EMULATED_CUDA_BF16_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/gpu/emulated/cuda_runtime.h"

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's.
struct __nv_bfloat16 {
  uint16_t bits;
};

// Rounds to the nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

inline float __bfloat162float(__nv_bfloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// NOLINTEND(bugprone-reserved-identifier)

#endif  // TANDEM_TESTS_GPU_EMULATED_CUDA_BF16_H_
