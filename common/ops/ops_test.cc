#include "common/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

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

TEST_F(OpsTest, RotaryTableGrowsAndKeepsItsValues) {
  RotaryTable table({1.0f, 0.01f}, 1.0);
  const auto [cos, sin] = table.Rows(at::tensor({int64_t{3}, int64_t{0}}));
  EXPECT_NEAR(cos[0][0].item<double>(), std::cos(3.0), 1e-7);
  EXPECT_NEAR(sin[0][1].item<double>(), std::sin(0.03), 1e-7);
  EXPECT_EQ(cos[1][0].item<double>(), 1.0);
  const auto [far_cos, far_sin] = table.Rows(at::tensor({int64_t{5000}, int64_t{3}}));
  EXPECT_NEAR(far_cos[0][1].item<double>(), std::cos(50.0), 1e-6);
  EXPECT_TRUE(at::equal(far_cos[1], cos[0]));
}

}  // namespace
}  // namespace tandem::ops
