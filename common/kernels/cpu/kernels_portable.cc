#define TANDEM_SIMD_WIDTH 4
#define TANDEM_SIMD_ROWS 2
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

const CpuKernels kPortableKernels = SimdKernels("portable");

}  // namespace tandem::kernels
