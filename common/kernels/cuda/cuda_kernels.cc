#include "common/kernels/cuda/cuda_kernels.h"

namespace tandem::kernels {

const DeviceKernels kCudaKernels = {.logit_statistics = LogitStatisticsCuda,
                                    .logit_gradient = LogitGradientCuda};

}  // namespace tandem::kernels
