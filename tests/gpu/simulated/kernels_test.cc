// Operations of a GPU with the project's kernels: the results of the CPU's.
#include "tests/gpu/simulated/kernels.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "common/ops/device_kernels.h"
#include "common/ops/ops.h"
#include "tests/gpu/simulated/counts.h"

namespace tandem::ops {
namespace {

const at::Device kGpu(at::kCUDA, 0);

class SimulatedKernelsTest : public testing::TestWithParam<at::ScalarType> {
 protected:
  SimulatedKernelsTest() { at::manual_seed(4); }

  // Returns normal numbers that the type under test represents.
  static at::Tensor Normal(at::IntArrayRef shape, double deviation = 1) {
    return (at::randn(shape) * deviation).to(GetParam()).to(at::kFloat);
  }

  // Expects the CPU's result from fn(on), in one launch; on(x) moves an operand.
  template <typename Function>
  void ExpectTheCpusResult(const Function& fn) {
    const c10::InferenceMode inference_mode;
    const at::Tensor expected = fn([](const at::Tensor& x) { return x; });
    const auto on_gpu = [](const at::Tensor& x) { return x.to(kGpu, GetParam()); };
    const simulated_gpu::WithKernels kernels;
    const int64_t before = simulated_gpu::TheCounts().launches;
    int64_t copies = 0;
    const at::Tensor result = fn([&](const at::Tensor& x) {
      const int64_t start = simulated_gpu::TheCounts().launches;
      at::Tensor moved = on_gpu(x);
      copies += simulated_gpu::TheCounts().launches - start;
      return moved;
    });
    EXPECT_EQ(simulated_gpu::TheCounts().launches - before - copies, 1);
    EXPECT_EQ(result.scalar_type(), GetParam());
    const double tolerance = GetParam() == at::kFloat ? 2e-6 : 4e-3;
    const at::Tensor difference = (result.cpu().to(at::kFloat) - expected).abs();
    EXPECT_LE((difference / expected.abs().clamp_min(1)).max().item<double>(), tolerance);
  }
};

INSTANTIATE_TEST_SUITE_P(Types, SimulatedKernelsTest, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

TEST_P(SimulatedKernelsTest, RmsNorm) {
  for (const int64_t width : {1, 33, 256, 1000}) {
    const at::Tensor x = Normal({5, width}, 3), weight = Normal({width});
    for (const double offset : {0.0, 1.0}) {
      ExpectTheCpusResult([&](auto on) { return ops::RmsNorm(on(x), on(weight), 1e-5, offset); });
    }
  }
  // The heads of a fused projection.
  const at::Tensor fused = Normal({4, 100}), weight = Normal({12});
  ExpectTheCpusResult([&](auto on) {
    return ops::RmsNorm(on(fused).narrow(1, 10, 60).view({4, 5, 12}), on(weight), 1e-5);
  });
}

// As a junior that has a GPU of its own, computed by the senior's thread.
TEST_P(SimulatedKernelsTest, AnotherDeviceThanTheSelectedOne) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  const at::Tensor x = Normal({3, 8}), weight = Normal({8});
  const auto norm = [&](at::Device device) {
    return ops::RmsNorm(x.to(device, GetParam()), weight.to(device, GetParam()), 1e-5);
  };
  EXPECT_TRUE(at::equal(norm({at::kCUDA, 1}).cpu(), norm(kGpu).cpu()));
}

TEST_P(SimulatedKernelsTest, Rotary) {
  const at::Tensor fused = Normal({7, 100}), angles = at::randn({7, 6});
  for (const int64_t half : {6, 4}) {  // all columns of a head, and some
    const at::Tensor cos = angles.narrow(1, 0, half).cos(), sin = angles.narrow(1, 0, half).sin();
    const at::Tensor cos_on_gpu = cos.to(kGpu), sin_on_gpu = sin.to(kGpu);
    ExpectTheCpusResult([&](auto on) {
      const at::Tensor x = on(fused).narrow(1, 10, 60).view({7, 5, 12});
      return x.is_cuda() ? RotaryEmbedding(x, cos_on_gpu, sin_on_gpu)
                         : RotaryEmbedding(x, cos.contiguous(), sin.contiguous());
    });
  }
}

TEST_P(SimulatedKernelsTest, Gates) {
  for (const int64_t width : {1, 256, 300}) {
    const at::Tensor x = Normal({6, 2 * width}, 3);
    for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh}) {
      ExpectTheCpusResult([&](auto on) { return Gated(on(x), activation); });
    }
  }
}

}  // namespace
}  // namespace tandem::ops
