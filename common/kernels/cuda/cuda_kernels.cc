#include "common/kernels/cuda/cuda_kernels.h"

namespace tandem::kernels {

const DeviceKernels kCudaKernels = {.rms_norm = RmsNormCuda,
                                    .rotary = RotaryCuda,
                                    .gated = GatedCuda,
                                    .grouped_linear = GroupedLinearCuda,
                                    .grouped_gradient = GroupedGradientCuda,
                                    .cache_write = CacheWriteCuda,
                                    .paged_attention = PagedAttentionCuda,
                                    .fold_partials = FoldPartialsCuda,
                                    .logit_statistics = LogitStatisticsCuda,
                                    .logit_gradient = LogitGradientCuda,
                                    .has_grouped_mm = HasGroupedMmCuda};

}  // namespace tandem::kernels
