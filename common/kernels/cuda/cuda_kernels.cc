#include "common/kernels/cuda/cuda_kernels.h"

namespace tandem::kernels {

const DeviceKernels kCudaKernels = {.rms_norm = RmsNormCuda,
                                    .rotary = RotaryCuda,
                                    .gated = GatedCuda,
                                    .logit_statistics = LogitStatisticsCuda,
                                    .logit_gradient = LogitGradientCuda};

}  // namespace tandem::kernels
