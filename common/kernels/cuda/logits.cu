#include <cuda_bf16.h>

#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/launch.cuh"

namespace tandem::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// max, sum exp(z - max) and sum exp(z - max) (z - max) over some logits of a row; the sum over no
// logits, and over logits of -infinity, is 0. A NaN among the logits makes the sum NaN.
struct Statistics {
  float max, sum, weighted;

  __device__ void Merge(const Statistics& other) {
    if (other.sum == 0 || other.max == -INFINITY) return;
    if (sum == 0) {
      *this = other;
      return;
    }
    const float highest = fmaxf(max, other.max);
    const float below = max - highest, others_below = other.max - highest;
    const float mine = expf(below), theirs = expf(others_below);
    weighted =
        mine * (weighted + below * sum) + theirs * (other.weighted + others_below * other.sum);
    sum = mine * sum + theirs * other.sum;
    max = highest;
  }
};

__device__ Statistics Shuffled(const Statistics& s, int offset) {
  return {__shfl_xor_sync(0xffffffffu, s.max, offset), __shfl_xor_sync(0xffffffffu, s.sum, offset),
          __shfl_xor_sync(0xffffffffu, s.weighted, offset)};
}

// Runs one block per row.
__global__ void LogitStatisticsKernel(DeviceLogitStatisticsArgs a) {
  const int64_t row = blockIdx.x;
  const float* z = a.logits + row * a.width;
  const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
  Statistics mine = {-INFINITY, 0, 0};
  for (int64_t j = threadIdx.x; j < a.width; j += kThreads) {
    mine.Merge({z[j] * scale, 1, 0});
  }
  for (int offset = 16; offset > 0; offset /= 2) mine.Merge(Shuffled(mine, offset));
  __shared__ Statistics partial[kWarps];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) mine.Merge(partial[i]);
  a.max[row] = mine.max;
  a.sum[row] = mine.sum;
  a.weighted[row] = mine.weighted;
  const int64_t column = a.labels[row] - a.first_label;
  a.label[row] = column >= 0 && column < a.width ? z[column] * scale : 0.0f;
}

// Runs one block per row. In bf16 the gradient overwrites the first half of the row: every thread
// has read its logit before any thread writes.
__global__ void LogitGradientKernel(DeviceLogitGradientArgs a) {
  const int64_t row = blockIdx.x;
  float* z = a.logits + row * a.width;
  const float scale = a.scales == nullptr ? 1.0f : a.scales[row];
  const int64_t label = a.labels[row] - a.first_label;
  for (int64_t begin = 0; begin < a.width; begin += kThreads) {
    const int64_t j = begin + threadIdx.x;
    float dz = 0;
    if (j < a.width) {
      const float d = z[j] * scale - a.max[row];
      dz = expf(d) * (a.constants[row] + a.slopes[row] * d);
      if (j == label) dz += a.at_label[row];
      if (a.soft_cap > 0) {
        const float t = z[j] / a.soft_cap;
        dz *= 1 - t * t;
      }
    }
    if (a.bfloat16) {
      __syncthreads();
      if (j < a.width) reinterpret_cast<__nv_bfloat16*>(z)[j] = __float2bfloat16(dz);
    } else if (j < a.width) {
      z[j] = dz;
    }
  }
}

}  // namespace

const char* LogitStatisticsCuda(const DeviceLogitStatisticsArgs& args, DeviceStream stream) {
  return LaunchKernel(LogitStatisticsKernel, args.rows, kThreads, args, stream);
}

const char* LogitGradientCuda(const DeviceLogitGradientArgs& args, DeviceStream stream) {
  return LaunchKernel(LogitGradientKernel, args.rows, kThreads, args, stream);
}

}  // namespace tandem::kernels
