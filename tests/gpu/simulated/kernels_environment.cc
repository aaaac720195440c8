// All tests of a program with the emulated kernels.
#include <gtest/gtest.h>

#include "tests/gpu/simulated/kernels.h"

namespace {

class Kernels : public testing::Environment {
  const tandem::simulated_gpu::WithKernels kernels_;
};

const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new Kernels);

}  // namespace
