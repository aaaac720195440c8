#define TANDEM_SIMD_WIDTH 16
#define TANDEM_SIMD_ROWS 6
#define TANDEM_PACKED_TILE_ROWS 12
#define TANDEM_PACKED_SUMS 24
#include "common/kernels/cpu/simd_impl.h"
// After simd_impl.h, whose vectors it uses.
#include "common/kernels/cpu/packed_linear_impl.h"

namespace tandem::kernels {

const CpuKernels kAvx512Kernels = WithLinear(SimdKernels("avx512"));

}  // namespace tandem::kernels
