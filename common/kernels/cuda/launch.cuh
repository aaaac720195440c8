// How kernels of this folder are launched: each takes one argument, a struct of device_kernels.h.
#ifndef TANDEM_COMMON_KERNELS_CUDA_LAUNCH_CUH_
#define TANDEM_COMMON_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/kernels/device_kernels.h"

namespace tandem::kernels {

// Launches `blocks` blocks, if there are any. Returns the error of the launch, or nullptr.
template <typename Args>
const char* LaunchKernel(void (*kernel)(Args), int64_t blocks, int threads, const Args& args,
                         DeviceStream stream) {
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "it has too many rows";
  void* arguments[] = {const_cast<Args*>(&args)};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3{static_cast<unsigned>(blocks)},
                                             dim3{static_cast<unsigned>(threads)}, arguments,
                                             /*sharedMem=*/0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // else the next operation reports it, too
  return cudaGetErrorString(error);
}

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_LAUNCH_CUH_
