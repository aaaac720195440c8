// Kernels on a GPU: raw device pointers and a stream, no header of torch or of the GPU's toolkit.
// The sibling of CpuKernels (cpu/cpu_kernels.h): one table for each type of device, which
// ops::DeviceKernelsOf finds by a tensor's device. docs/internals/kernels.md says which kernel runs
// where.
#ifndef TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
#define TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_

#include <cstdint>

#include "common/kernels/gate_activation.h"

namespace tandem::kernels {

// A stream as the toolkit has it (cudaStream_t): c10::Stream::native_handle.
using DeviceStream = void*;

// RMSNorm: y = x / sqrt(mean(x^2) + eps) (weight + offset) for each vector of `width` numbers; sums
// and products in float32.
struct DeviceRmsNormArgs {
  const void* x;  // the head h of row r begins at x + r row_stride + h head_stride, in numbers
  int64_t row_stride;
  int64_t head_stride;
  const void* weight;  // [width]
  void* y;             // [rows, heads, width]
  int64_t rows;
  int64_t heads;
  int64_t width;
  float eps;
  float offset;
  bool bfloat16;  // x, weight and y; else float32
};

// The rotation of the first `rotated` columns of every head, as ops::RotaryEmbedding; in float32.
struct DeviceRotaryArgs {
  const void* x;  // row r begins at x + r row_stride, in numbers; heads are contiguous
  int64_t row_stride;
  const float* cos;  // [rows, rotated / 2]
  const float* sin;
  void* y;  // [rows, heads, head_dim]
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
  int64_t rotated;
  bool bfloat16;  // x and y; else float32
};

// y = activation(gate) up, for rows of gates and ups side by side; in float32.
struct DeviceGatedArgs {
  const void* gate_up;  // row r begins at gate_up + r row_stride, in numbers: [2 width]
  int64_t row_stride;
  void* y;  // [rows, width]
  int64_t rows;
  int64_t width;
  GateActivation activation;
  bool bfloat16;  // gate_up and y; else float32
};

// LogitStatisticsArgs of cpu_kernels.h, with the logit of each row's label.
struct DeviceLogitStatisticsArgs {
  const float* logits;  // [rows, width]
  const float* scales;  // [rows], or nullptr for 1
  const int64_t* labels;
  int64_t first_label;  // the token of column 0
  int64_t rows;
  int64_t width;
  float* max;  // [rows]
  float* sum;
  float* weighted;
  float* label;  // scaled; 0 where the label is not among the columns
};

// LogitGradientArgs of cpu_kernels.h, with `at_label` added at each row's label.
struct DeviceLogitGradientArgs {
  float* logits;  // [rows, width]
  const float* scales;
  const int64_t* labels;
  int64_t first_label;
  int64_t rows;
  int64_t width;
  const float* max;  // [rows]
  const float* constants;
  const float* slopes;
  const float* at_label;
  bool bfloat16;
  float soft_cap;  // 0: none
};

// Launches a kernel, and returns the error of the launch, or nullptr. Errors of the kernel itself
// surface at the next synchronisation.
template <typename Args>
using DeviceKernel = const char* (*)(const Args& args, DeviceStream stream);

// The table of kernels. ATen computes where an entry is nullptr.
struct DeviceKernels {
  DeviceKernel<DeviceRmsNormArgs> rms_norm = nullptr;
  DeviceKernel<DeviceRotaryArgs> rotary = nullptr;
  DeviceKernel<DeviceGatedArgs> gated = nullptr;
  DeviceKernel<DeviceLogitStatisticsArgs> logit_statistics = nullptr;
  DeviceKernel<DeviceLogitGradientArgs> logit_gradient = nullptr;
};

// The table of CUDA, in a build with CUDA (cuda/cuda_kernels.cc).
extern const DeviceKernels kCudaKernels;

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
