// A program whose operations on simulated GPUs run the emulated kernels.
#include "tests/gpu/simulated/kernels.h"

namespace {

// Leaked: threads of the program may compute until it ends.
[[maybe_unused]] const auto& kernels = *new tandem::simulated_gpu::WithKernels;

}  // namespace
