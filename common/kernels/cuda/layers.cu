#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/launch.cuh"
#include "common/kernels/cuda/numbers.cuh"

namespace tandem::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Runs one block per head of a row. A vector's sum depends on its width alone.
template <typename Number>
__global__ void RmsNormKernel(DeviceRmsNormArgs a) {
  const int64_t row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
  const auto* x = static_cast<const Number*>(a.x) + row * a.row_stride + head * a.head_stride;
  const auto* weight = static_cast<const Number*>(a.weight);
  auto* y = static_cast<Number*>(a.y) + int64_t{blockIdx.x} * a.width;
  float squares = 0;
  for (int64_t j = threadIdx.x; j < a.width; j += kThreads) {
    const float value = Read(x, j);
    squares += value * value;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
  }
  __shared__ float partial[kWarps];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kWarps; ++i) total += partial[i];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(a.width) + a.eps);
  for (int64_t j = threadIdx.x; j < a.width; j += kThreads) {
    Write(y, j, Read(x, j) * scale * (Read(weight, j) + a.offset));
  }
}

// Runs one block per row.
template <typename Number>
__global__ void RotaryKernel(DeviceRotaryArgs a) {
  const int64_t row = blockIdx.x, half = a.rotated / 2;
  const auto* x = static_cast<const Number*>(a.x) + row * a.row_stride;
  auto* y = static_cast<Number*>(a.y) + row * a.heads * a.head_dim;
  const float *cos = a.cos + row * half, *sin = a.sin + row * half;
  for (int64_t i = threadIdx.x; i < a.heads * a.head_dim; i += kThreads) {
    const int64_t d = i % a.head_dim;
    float value = Read(x, i);
    if (d < half) {
      value = value * cos[d] - Read(x, i + half) * sin[d];
    } else if (d < a.rotated) {
      value = value * cos[d - half] + Read(x, i - half) * sin[d - half];
    }
    Write(y, i, value);
  }
}

// Runs as many blocks per row as its gates fill.
template <typename Number>
__global__ void GatedKernel(DeviceGatedArgs a) {
  const int64_t blocks = (a.width + kThreads - 1) / kThreads;
  const int64_t row = blockIdx.x / blocks;
  const int64_t column = blockIdx.x % blocks * kThreads + threadIdx.x;
  if (column >= a.width) return;
  const auto* gate_up = static_cast<const Number*>(a.gate_up) + row * a.row_stride;
  const float g = Read(gate_up, column), up = Read(gate_up, column + a.width);
  constexpr float kSqrt2ByPi = 0.7978845608f, kCubic = 0.044715f;
  const float z =
      a.activation == GateActivation::kSilu ? g : 2 * kSqrt2ByPi * (g + kCubic * g * g * g);
  Write(static_cast<Number*>(a.y), row * a.width + column, g / (1 + expf(-z)) * up);
}

}  // namespace

const char* RmsNormCuda(const DeviceRmsNormArgs& args, DeviceStream stream) {
  return LaunchKernel(args.bfloat16 ? RmsNormKernel<__nv_bfloat16> : RmsNormKernel<float>,
                      args.rows * args.heads, kThreads, args, stream);
}

const char* RotaryCuda(const DeviceRotaryArgs& args, DeviceStream stream) {
  return LaunchKernel(args.bfloat16 ? RotaryKernel<__nv_bfloat16> : RotaryKernel<float>, args.rows,
                      kThreads, args, stream);
}

const char* GatedCuda(const DeviceGatedArgs& args, DeviceStream stream) {
  return LaunchKernel(args.bfloat16 ? GatedKernel<__nv_bfloat16> : GatedKernel<float>,
                      args.rows * ((args.width + kThreads - 1) / kThreads), kThreads, args, stream);
}

}  // namespace tandem::kernels
