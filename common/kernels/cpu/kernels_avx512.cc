#define TANDEM_SIMD_WIDTH 16
#define TANDEM_SIMD_ROWS 6
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

extern const CpuKernels kAvx512Kernels;
const CpuKernels kAvx512Kernels = {"avx512",        Linear,        Attention,      RmsNorm,
                                   RmsNormBackward, Rotary,        SwiGlu,         SwiGluBackward,
                                   LogitStatistics, LogitGradient, LogitDivergence};

}  // namespace tandem::kernels
