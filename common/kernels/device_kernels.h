// Kernels on a GPU: raw device pointers and a stream, no header of torch or of the GPU's toolkit.
// The sibling of CpuKernels (cpu/cpu_kernels.h): one table for each type of device, which
// ops::DeviceKernelsOf finds by a tensor's device. docs/internals/kernels.md says which kernel runs
// where.
#ifndef TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
#define TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_

#include <cstdint>

namespace tandem::kernels {

// A stream as the toolkit has it (cudaStream_t): c10::Stream::native_handle.
using DeviceStream = void*;

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
  DeviceKernel<DeviceLogitStatisticsArgs> logit_statistics = nullptr;
  DeviceKernel<DeviceLogitGradientArgs> logit_gradient = nullptr;
};

// The table of CUDA, in a build with CUDA (cuda/cuda_kernels.cc).
extern const DeviceKernels kCudaKernels;

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_DEVICE_KERNELS_H_
