#define TANDEM_SIMD_WIDTH 8
#define TANDEM_SIMD_ROWS 2
#define TANDEM_PACKED_TILE_ROWS 6
#define TANDEM_PACKED_SUMS 12
#include "common/kernels/cpu/simd_impl.h"
// After simd_impl.h, whose vectors it uses.
#include "common/kernels/cpu/packed_linear_impl.h"

namespace tandem::kernels {

const CpuKernels kAvx2Kernels = WithLinear(SimdKernels("avx2"));

}  // namespace tandem::kernels
