// CUDA kernels of the fused output loss: raw device pointers and a stream, no torch header. Each
// function returns the error of the launch; errors of the kernel itself surface at the next
// synchronisation.
#ifndef TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::kernels {

// LogitStatisticsArgs of cpu_kernels.h, with the logit of each row's label.
struct LogitStatisticsCudaArgs {
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
cudaError_t LogitStatisticsCuda(const LogitStatisticsCudaArgs& args, cudaStream_t stream);

// LogitGradientArgs of cpu_kernels.h, with `at_label` added at each row's label.
struct LogitGradientCudaArgs {
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
cudaError_t LogitGradientCuda(const LogitGradientCudaArgs& args, cudaStream_t stream);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
