// CUDA kernels behind common/ops: raw device pointers and a stream, no torch header.
#ifndef TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::kernels {

// y = x / sqrt(mean(x^2) + eps) * w for `rows` contiguous rows of `width` floats; one block a row,
// so that a row's numbers do not depend on how many others there are. y may be x.
// Returns what launching returned; errors of the kernel itself surface at the next synchronisation.
cudaError_t RmsNormCuda(const float* x, const float* w, float* y, int64_t rows, int64_t width,
                        float eps, cudaStream_t stream);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
