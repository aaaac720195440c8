#define TANDEM_SIMD_WIDTH 16
#define TANDEM_SIMD_ROWS 6
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

const CpuKernels kAvx512Kernels = SimdKernels("avx512");

}  // namespace tandem::kernels
