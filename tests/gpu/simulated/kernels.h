// The project's kernels of GPUs on simulated ones.
#ifndef TANDEM_TESTS_GPU_SIMULATED_KERNELS_H_
#define TANDEM_TESTS_GPU_SIMULATED_KERNELS_H_

namespace tandem::simulated_gpu {

// While it lives, operations on simulated GPUs run the emulated kernels.
class WithKernels {
 public:
  WithKernels();
  ~WithKernels();
  WithKernels(const WithKernels&) = delete;
  WithKernels& operator=(const WithKernels&) = delete;
};

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_KERNELS_H_
