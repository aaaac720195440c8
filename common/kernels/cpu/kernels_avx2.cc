#define TANDEM_SIMD_WIDTH 8
#define TANDEM_SIMD_ROWS 2
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

const CpuKernels kAvx2Kernels = SimdKernels("avx2");

}  // namespace tandem::kernels
