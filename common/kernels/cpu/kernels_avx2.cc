#define TANDEM_SIMD_WIDTH 8
#define TANDEM_SIMD_ROWS 2
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

extern const CpuKernels kAvx2Kernels;
const CpuKernels kAvx2Kernels = {"avx2",          Linear,        Attention,      RmsNorm,
                                 RmsNormBackward, Rotary,        SwiGlu,         SwiGluBackward,
                                 LogitStatistics, LogitGradient, LogitDivergence};

}  // namespace tandem::kernels
