// Access of the simulated GPUs' operations to their operands.
#ifndef TANDEM_TESTS_GPU_SIMULATED_HOST_BYTES_H_
#define TANDEM_TESTS_GPU_SIMULATED_HOST_BYTES_H_

#include <ATen/core/Tensor.h>

namespace tandem::simulated_gpu {

// Returns a tensor of the CPU with the bytes of a tensor of a device.
at::Tensor OnCpu(const at::Tensor& x);

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_HOST_BYTES_H_
