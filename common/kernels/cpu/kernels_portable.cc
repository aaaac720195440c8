#define TANDEM_SIMD_WIDTH 4
#define TANDEM_SIMD_ROWS 2
#include "common/kernels/cpu/simd_impl.h"

namespace tandem::kernels {

extern const CpuKernels kPortableKernels;
const CpuKernels kPortableKernels = {"portable",      Linear,        Attention,      RmsNorm,
                                     RmsNormBackward, Rotary,        SwiGlu,         SwiGluBackward,
                                     LogitStatistics, LogitGradient, LogitDivergence};

}  // namespace tandem::kernels
