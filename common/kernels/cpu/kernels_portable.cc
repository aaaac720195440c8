#define TANDEM_SIMD_WIDTH 4
#define TANDEM_SIMD_ROWS 2
#define TANDEM_PACKED_TILE_ROWS 3
#define TANDEM_PACKED_SUMS 12
#include "common/kernels/cpu/simd_impl.h"
// After simd_impl.h, whose vectors it uses.
#include "common/kernels/cpu/packed_linear_impl.h"

namespace tandem::kernels {

const CpuKernels kPortableKernels = WithLinear(SimdKernels("portable"));

}  // namespace tandem::kernels
