#include "common/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "common/ops/rotary_table.h"

namespace tandem::ops {
namespace {

// Runs `fn` through ATen (autograd on) and through the kernels, and compares.
template <typename Function>
void ExpectPathsAgree(const Function& fn, double tolerance) {
  at::Tensor reference = fn(), result;
  {
    c10::InferenceMode guard;
    result = fn();
  }
  ASSERT_EQ(result.sizes(), reference.sizes());
  EXPECT_LE((result - reference).abs().max().item<double>(), tolerance);
}

class OpsTest : public testing::Test {
 protected:
  OpsTest() { at::manual_seed(1); }
};

TEST_F(OpsTest, LinearPathsAgree) {
  const at::Tensor x = at::randn({37, 50}), w = at::randn({71, 50}), bias = at::randn({71});
  ExpectPathsAgree([&] { return Linear(x, w, bias); }, 2e-5);
  EXPECT_LE((Linear(x, w, bias) - at::linear(x, w, bias)).abs().max().item<double>(), 2e-5);
  ExpectPathsAgree([&] { return Linear(x.narrow(1, 5, 20), w.narrow(1, 5, 20)); }, 2e-5);
  const at::Tensor residual = at::randn({37, 71});
  ExpectPathsAgree([&] { return LinearAdd(residual.clone(), x, w, bias); }, 2e-5);
}

TEST_F(OpsTest, NormRotaryAndGatePathsAgree) {
  const at::Tensor fused = at::randn({9, 100});  // as a fused projection leaves them
  const at::Tensor heads = fused.narrow(1, 10, 60).view({9, 5, 12});
  const at::Tensor weight = at::randn({12});
  ExpectPathsAgree([&] { return RmsNorm(heads, weight, 1e-5); }, 1e-5);
  ExpectPathsAgree([&] { return RmsNorm(fused, at::ones({100}), 1e-5); }, 1e-5);
  const at::Tensor cos = at::randn({9, 6}), sin = at::randn({9, 6});
  ExpectPathsAgree([&] { return RotaryEmbedding(heads, cos, sin); }, 1e-5);
  ExpectPathsAgree([&] { return SwiGlu(fused.narrow(1, 0, 33), fused.narrow(1, 40, 33)); }, 1e-5);
}

TEST_F(OpsTest, AttentionPathsAgreeOnRaggedBatches) {
  const at::Tensor q = at::randn({100, 6, 10}), k = at::randn({100, 2, 10});
  const at::Tensor v = at::randn({100, 2, 10});
  ExpectPathsAgree([&] { return CausalAttention(q, k, v, {0, 1, 1, 77, 100}); }, 1e-5);
}

TEST_F(OpsTest, CachedAttentionEqualsCausalAttentionBitForBit) {
  c10::InferenceMode guard;
  const int64_t length = 90;
  const at::Tensor q = at::randn({length, 6, 16}), k = at::randn({length, 3, 16});
  const at::Tensor v = at::randn({length, 3, 16});
  const at::Tensor whole = CausalAttention(q, k, v, {0, length});
  at::Tensor keys = at::full({4, 3, 128, 16}, std::nan("")), values = keys.clone();
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 40}, {40, 41}, {41, 90}}) {
    const int64_t rows = end - begin;
    const auto part = [start = begin, rows](const at::Tensor& x) {
      return x.narrow(0, start, rows);
    };
    const at::Tensor out =
        CachedAttention(part(q), part(k), part(v), {0, rows}, {2}, {begin}, keys, values);
    EXPECT_TRUE(at::equal(out, part(whole)));
  }
}

TEST_F(OpsTest, InferenceRowsDoNotDependOnTheBatch) {
  c10::InferenceMode guard;
  const at::Tensor x = at::randn({300, 96}), w = at::randn({200, 96});
  const at::Tensor all = Linear(x, w);
  for (const int64_t row : {0, 1, 150, 299}) {
    EXPECT_TRUE(at::equal(Linear(x.narrow(0, row, 1), w), all.narrow(0, row, 1)));
  }
}

TEST_F(OpsTest, LinearHasTheGradientsOfAten) {
  const at::Tensor x = at::randn({19, 33}), w = at::randn({21, 33}), bias = at::randn({21});
  const at::Tensor dy = at::randn({19, 21});
  std::vector<std::vector<at::Tensor>> leaves;
  for (int i = 0; i < 2; ++i) {
    leaves.push_back(
        {x.clone().requires_grad_(), w.clone().requires_grad_(), bias.clone().requires_grad_()});
    const auto& [xi, wi, bi] = std::tie(leaves[i][0], leaves[i][1], leaves[i][2]);
    (i == 0 ? Linear(xi, wi, bi) : at::linear(xi, wi, bi)).backward(dy);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_LE((leaves[0][i].grad() - leaves[1][i].grad()).abs().max().item<double>(), 2e-5) << i;
  }
  // A frozen weight costs no product.
  const at::Tensor leaf = x.clone().requires_grad_();
  Linear(leaf, w).sum().backward();
  EXPECT_FALSE(w.grad().defined());
  EXPECT_TRUE(leaf.grad().defined());
}

TEST_F(OpsTest, LinearHasTheSameBitsWithAndWithoutAutograd) {
  const at::Tensor x = at::randn({19, 33}).requires_grad_(), w = at::randn({21, 33});
  const at::Tensor training = Linear(x, w);
  c10::InferenceMode guard;
  EXPECT_TRUE(at::equal(training, Linear(x, w)));
}

TEST_F(OpsTest, AttentionIsDifferentiable) {
  at::Tensor q = at::randn({5, 4, 8}).requires_grad_(), k = at::randn({5, 2, 8}).requires_grad_();
  at::Tensor v = at::randn({5, 2, 8}).requires_grad_();
  CausalAttention(q, k, v, {0, 2, 5}).pow(2).sum().backward();
  for (const at::Tensor& x : {q, k, v}) {
    ASSERT_TRUE(x.grad().defined());
    EXPECT_GT(x.grad().abs().sum().item<double>(), 0);
  }
}

// What a device or type without kernels of our own runs, beside the CPU kernels in fp32.
struct AtenCase {
  const char* name;
  at::DeviceType device;
  at::ScalarType dtype;
  double tolerance;  // of numbers of size 1
};

class AtenPathTest : public testing::TestWithParam<AtenCase> {
 protected:
  void SetUp() override {
    if (GetParam().device == at::kCUDA && !at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
    at::manual_seed(2);
  }
  void TearDown() override { SetKernelPath(KernelPath::kAuto); }

  // N(0, 1), on the CPU in fp32, representable in the type under test.
  static at::Tensor Normal(at::IntArrayRef shape) {
    return at::randn(shape).to(GetParam().dtype).to(at::kFloat);
  }
  static at::Tensor Moved(const at::Tensor& x) {
    return x.to(GetParam().device, GetParam().dtype, /*non_blocking=*/false, /*copy=*/true);
  }

  // `fn` is given a function that brings an operand to device and type.
  template <typename Function>
  static void ExpectTheKernelsResult(const Function& fn) {
    c10::InferenceMode guard;
    SetKernelPath(KernelPath::kAuto);
    const at::Tensor expected = fn([](const at::Tensor& x) { return x.clone(); });
    SetKernelPath(KernelPath::kAten);
    const at::Tensor result = fn(Moved);
    EXPECT_EQ(result.scalar_type(), GetParam().dtype);
    EXPECT_EQ(result.device().type(), GetParam().device);
    ASSERT_EQ(result.sizes(), expected.sizes());
    const at::Tensor difference = (result.to(at::kCPU, at::kFloat) - expected).abs();
    const double scale = std::max(1.0, expected.abs().max().item<double>());
    EXPECT_LE(difference.max().item<double>(), GetParam().tolerance * scale);
  }
};

INSTANTIATE_TEST_SUITE_P(DeviceAndType, AtenPathTest,
                         testing::Values(AtenCase{"CpuFloat32", at::kCPU, at::kFloat, 1e-5},
                                         AtenCase{"CpuBfloat16", at::kCPU, at::kBFloat16, 2e-2},
                                         AtenCase{"CudaFloat32", at::kCUDA, at::kFloat, 1e-5},
                                         AtenCase{"CudaBfloat16", at::kCUDA, at::kBFloat16, 2e-2}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(AtenPathTest, LinearMaps) {
  const at::Tensor x = Normal({7, 50}), w = Normal({13, 50}), bias = Normal({13});
  const at::Tensor residual = Normal({7, 13});
  ExpectTheKernelsResult([&](auto on) { return Linear(on(x), on(w), on(bias)); });
  ExpectTheKernelsResult([&](auto on) { return LinearAdd(on(residual), on(x), on(w), on(bias)); });
}

TEST_P(AtenPathTest, NormRotaryGateAndEmbedding) {
  const at::Tensor x = Normal({9, 5, 12}), weight = at::randn({12});
  const at::Tensor cos = at::randn({9, 6}), sin = at::randn({9, 6});
  const at::Tensor gate = Normal({9, 33}), up = Normal({9, 33});
  const at::Tensor table = Normal({20, 4}), tokens = at::tensor({3, 0, 19}, at::kLong);
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(x);
    return RmsNorm(moved, weight.to(moved.device()), 1e-5);  // an fp32 master
  });
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(x);
    return RotaryEmbedding(moved, cos.to(moved.device()), sin.to(moved.device()));
  });
  ExpectTheKernelsResult([&](auto on) { return SwiGlu(on(gate), on(up)); });
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor moved = on(table);
    return Embedding(tokens.to(moved.device()), moved);
  });
}

TEST_P(AtenPathTest, CausalAttentionOfRaggedBatches) {
  const at::Tensor q = Normal({50, 6, 16}), k = Normal({50, 2, 16}), v = Normal({50, 2, 16});
  ExpectTheKernelsResult([&](auto on) {
    return CausalAttention(on(q), on(k), on(v), {0, 1, 1, 37, 50});
  });
}

TEST_P(AtenPathTest, CachedAttentionContinuesSequences) {
  const at::Tensor q = Normal({40, 6, 16}), k = Normal({40, 2, 16}), v = Normal({40, 2, 16});
  ExpectTheKernelsResult([&](auto on) {
    const at::Tensor empty = at::full({3, 2, 64, 16}, std::nan(""));
    const at::Tensor keys = on(empty), values = on(empty);
    const auto pass = [&](int64_t begin, const std::vector<int64_t>& offsets,
                          const std::vector<int64_t>& slots, const std::vector<int64_t>& starts) {
      const auto rows = [&](const at::Tensor& x) { return on(x.narrow(0, begin, offsets.back())); };
      return CachedAttention(rows(q), rows(k), rows(v), offsets, slots, starts, keys, values);
    };
    // A prompt; one more row of it beside another prompt; several more rows of both.
    return at::cat({pass(0, {0, 10}, {2}, {0}), pass(10, {0, 1, 15}, {2, 0}, {10, 0}),
                    pass(25, {0, 5, 15}, {0, 2}, {14, 11})});
  });
}

TEST_P(AtenPathTest, HasGradients) {
  SetKernelPath(KernelPath::kAten);
  const at::Tensor x = Moved(at::randn({6, 16})).requires_grad_();
  const at::Tensor w = Moved(at::randn({16, 16})).requires_grad_();
  const at::Tensor norm = at::ones({16}).to(GetParam().device).requires_grad_();
  const at::Tensor angle = at::randn({6, 4}).to(GetParam().device);
  const at::Tensor h = Linear(RmsNorm(x, norm, 1e-5), w);
  const at::Tensor heads = RotaryEmbedding(h.view({6, 2, 8}), angle.cos(), angle.sin());
  const at::Tensor y = CausalAttention(heads, heads, heads, {0, 2, 6});
  SwiGlu(LinearAdd(x, y, w), y).sum().backward();
  for (const at::Tensor& leaf : {x, w, norm}) {
    ASSERT_TRUE(leaf.grad().defined());
    EXPECT_EQ(leaf.grad().scalar_type(), leaf.scalar_type());
    EXPECT_GT(leaf.grad().abs().sum().item<double>(), 0);
  }
}

TEST_F(OpsTest, RotaryTableGrowsAndKeepsItsValues) {
  RotaryTable table({1.0f, 0.01f}, 1.0, at::kCPU);
  const auto [cos, sin] = table.Rows(at::tensor({int64_t{3}, int64_t{0}}), 4);
  EXPECT_NEAR(cos[0][0].item<double>(), std::cos(3.0), 1e-7);
  EXPECT_NEAR(sin[0][1].item<double>(), std::sin(0.03), 1e-7);
  EXPECT_EQ(cos[1][0].item<double>(), 1.0);
  const auto [far_cos, far_sin] = table.Rows(at::tensor({int64_t{5000}, int64_t{3}}), 5001);
  EXPECT_NEAR(far_cos[0][1].item<double>(), std::cos(50.0), 1e-6);
  EXPECT_TRUE(at::equal(far_cos[1], cos[0]));
}

}  // namespace
}  // namespace tandem::ops
