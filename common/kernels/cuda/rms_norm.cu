#include "common/kernels/cuda/cuda_kernels.h"

namespace tandem::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

__global__ void RmsNormKernel(const float* x, const float* w, float* y, int64_t width, float eps) {
  const float* row = x + blockIdx.x * width;
  float* out = y + blockIdx.x * width;
  float squares = 0;
  for (int64_t k = threadIdx.x; k < width; k += kThreads) squares += row[k] * row[k];
  __shared__ float partial[kWarps];
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kWarps; ++i) total += partial[i];
  const float factor = 1.0f / sqrtf(total / static_cast<float>(width) + eps);
  for (int64_t k = threadIdx.x; k < width; k += kThreads) out[k] = row[k] * factor * w[k];
}

}  // namespace

cudaError_t RmsNormCuda(const float* x, const float* w, float* y, int64_t rows, int64_t width,
                        float eps, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  RmsNormKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(x, w, y, width, eps);
  return cudaGetLastError();
}

}  // namespace tandem::kernels
