#include "common/ops/linear/linear_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/ops/products/packed_weight.h"

namespace tandem::ops {
namespace {

// Two maps [5, 12] and [3, 12] with biases, stacked as a ParameterStore stacks them.
struct Maps {
  explicit Maps(at::ScalarType compute_dtype, bool second_trains = true, bool rounds = false) {
    at::manual_seed(4);
    stacked = at::randn({8, 12});
    bias = at::randn({8});
    weights = {stacked.narrow(0, 0, 5).detach(), stacked.narrow(0, 5, 3).detach()};
    biases = {bias.narrow(0, 0, 5).detach(), bias.narrow(0, 5, 3).detach()};
    for (auto* tensors : {&weights, &biases}) {
      (*tensors)[0].set_requires_grad(true);
      (*tensors)[1].set_requires_grad(second_trains);
    }
    linear = std::make_unique<LinearWeight>(stacked, bias, weights, biases, compute_dtype, rounds);
  }

  at::Tensor stacked, bias;
  std::vector<at::Tensor> weights, biases;
  std::unique_ptr<LinearWeight> linear;
};

double MaxError(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kFloat) - b.to(at::kFloat)).abs().max().item<double>();
}

TEST(LinearWeightTest, StackedMapsHaveTheOutputsAndGradientsOfSeparateOnes) {
  const Maps maps(at::kFloat);
  const at::Tensor x = at::randn({7, 12}).requires_grad_();
  const std::vector<at::Tensor> y = maps.linear->Forward(x).split_with_sizes({5, 3}, 1);
  const at::Tensor dy0 = at::randn({7, 5}), dy1 = at::randn({7, 3});
  ((y[0] * dy0).sum() + (y[1] * dy1).sum()).backward();
  for (int i = 0; i < 2; ++i) {
    const at::Tensor& dy = i == 0 ? dy0 : dy1;
    EXPECT_LE(MaxError(y[i], at::linear(x, maps.weights[i], maps.biases[i])), 1e-5);
    EXPECT_LE(MaxError(maps.weights[i].grad(), dy.t().mm(x)), 1e-5);
    EXPECT_LE(MaxError(maps.biases[i].grad(), dy.sum(0)), 1e-5);
  }
  EXPECT_LE(MaxError(x.grad(), dy0.mm(maps.weights[0]) + dy1.mm(maps.weights[1])), 1e-5);
}

TEST(LinearWeightTest, TrainingHasTheBitsOfInference) {
  const Maps maps(at::kFloat);
  const at::Tensor x = at::randn({7, 12});
  const at::Tensor training = maps.linear->Forward(x);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(training, maps.linear->Forward(x)));
}

TEST(LinearWeightTest, AFrozenMapHasNoGradient) {
  const Maps maps(at::kFloat, /*second_trains=*/false);
  const at::Tensor x = at::randn({7, 12}).requires_grad_();
  maps.linear->Forward(x).narrow(1, 0, 5).sum().backward();
  EXPECT_TRUE(maps.weights[0].grad().defined());
  EXPECT_FALSE(maps.weights[1].grad().defined());
  EXPECT_FALSE(maps.biases[1].grad().defined());
  EXPECT_LE(MaxError(x.grad(), maps.weights[0].sum(0).expand({7, 12})), 1e-5);
}

TEST(LinearWeightTest, Bfloat16ComputesWithACopyAndTrainsFloatMasters) {
  const Maps maps(at::kBFloat16);
  const at::Tensor x = at::randn({7, 12}).to(at::kBFloat16).requires_grad_();
  const at::Tensor y = maps.linear->Forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LE(
      MaxError(y.narrow(1, 0, 5), at::linear(x.to(at::kFloat), maps.weights[0], maps.biases[0])),
      0.1);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(maps.weights[1].grad().scalar_type(), at::kFloat);
  // The sum over rows is exact in float32, so it was not rounded to bf16.
  EXPECT_LE(MaxError(maps.weights[1].grad()[0], x.detach().to(at::kFloat).sum(0)), 1e-5);
}

TEST(LinearWeightTest, AStaleCopyIsRefusedUntilItIsRefreshed) {
  Maps maps(at::kBFloat16);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({2, 12}).to(at::kBFloat16);
  maps.weights[1].mul_(2);
  EXPECT_THROW(maps.linear->Forward(x), c10::Error);
  EXPECT_THROW(maps.linear->compute_weight(), c10::Error);
  const auto refreshed = [&] {
    maps.linear->OnWeightsChanged();
    return maps.linear->compute_weight();
  };
  const at::Tensor copy = refreshed();
  EXPECT_TRUE(at::equal(copy, maps.stacked.to(at::kBFloat16)));
  maps.stacked.zero_();
  EXPECT_TRUE(refreshed().is_same(copy));  // a holder of the tensor sees the new values
}

Maps RoundedMaps() { return Maps(at::kFloat, /*second_trains=*/true, /*rounds=*/true); }

TEST(LinearWeightTest, RoundedMapsHaveTheBitsOfMapsPackedInBfloat16) {
  Maps maps = RoundedMaps();
  if (!PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  const at::Tensor x = at::randn({7, 12}), residual = at::randn({7, 8});
  for (int update = 0; update < 2; ++update) {
    const at::Tensor masters = maps.stacked.clone();
    const auto packed =
        std::make_shared<const PackedWeight>(kernels::WeightFormat::kBfloat16, 8, 12);
    packed->SetRows(0, masters);
    const LinearWeight inferring(packed, maps.bias, {maps.bias});
    const at::Tensor training = maps.linear->Forward(x),
                     added = maps.linear->ForwardAdd(residual, x);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(training, inferring.Forward(x)));
    EXPECT_TRUE(at::equal(maps.linear->Forward(x), training));
    EXPECT_TRUE(at::equal(added, inferring.ForwardAdd(residual.clone(), x)));
    EXPECT_TRUE(at::equal(maps.linear->Logits(x, 5), training.narrow(1, 0, 5)));
    EXPECT_TRUE(at::equal(maps.linear->compute_weight(), masters.to(at::kBFloat16).to(at::kFloat)));
    EXPECT_TRUE(at::equal(maps.stacked, masters)) << "masters keep their bits";
    for (const at::Tensor& weight : maps.weights) weight.add_(0.3);
    EXPECT_THROW(maps.linear->Forward(x), c10::Error) << "stale";
    maps.linear->OnWeightsChanged();
  }
}

// Gradients are those of maps with the rounded values, and not rounded themselves.
TEST(LinearWeightTest, RoundedMapsHaveTheGradientsOfTheirRoundedValues) {
  const Maps maps = RoundedMaps();
  const at::Tensor x = at::randn({7, 12}).requires_grad_(), dy = at::randn({7, 8});
  maps.linear->Forward(x).backward(dy);
  const at::Tensor rounded = maps.stacked.to(at::kBFloat16).to(at::kDouble),
                   exact = dy.to(at::kDouble);
  const auto error = [](const at::Tensor& a, const at::Tensor& b) {
    return (a.to(at::kDouble) - b).abs().max().item<double>();
  };
  // Sums of at most 12 numbers near 1 in float32.
  EXPECT_LE(error(x.grad(), exact.mm(rounded)), 1e-5);
  EXPECT_GT(error(x.grad(), exact.mm(maps.stacked.to(at::kDouble))), 1e-4);
  const at::Tensor of_weights = exact.t().mm(x.detach().to(at::kDouble));
  EXPECT_LE(error(maps.weights[0].grad(), of_weights.narrow(0, 0, 5)), 1e-5);
  EXPECT_LE(error(maps.weights[1].grad(), of_weights.narrow(0, 5, 3)), 1e-5);
  EXPECT_LE(error(maps.biases[1].grad(), exact.sum(0).narrow(0, 5, 3)), 1e-5);
}

// Maps that round their inputs.
Maps RoundingMaps() { return Maps(at::kBFloat16, /*second_trains=*/true, /*rounds=*/true); }

TEST(LinearWeightTest, MapsThatRoundInputsHaveTheBitsOfPackedOnes) {
  Maps maps = RoundingMaps();
  if (!PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  const at::Tensor x = at::randn({7, 12}), residual = at::randn({7, 8});
  for (int update = 0; update < 2; ++update) {
    const auto packed =
        std::make_shared<const PackedWeight>(kernels::WeightFormat::kBfloat16, 8, 12);
    packed->SetRows(0, maps.stacked);
    const LinearWeight inferring(packed, maps.bias, {maps.bias}, /*rounds_inputs=*/true);
    const at::Tensor training = maps.linear->Forward(x),
                     added = maps.linear->ForwardAdd(residual, x);
    EXPECT_EQ(training.scalar_type(), at::kFloat);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(training, inferring.Forward(x)));
    EXPECT_FALSE(at::equal(training, LinearWeight(packed, maps.bias, {maps.bias}).Forward(x)));
    EXPECT_TRUE(at::equal(training, inferring.Forward(x.to(at::kBFloat16).to(at::kFloat))));
    EXPECT_TRUE(at::equal(maps.linear->Forward(x), training));
    EXPECT_TRUE(at::equal(added, inferring.ForwardAdd(residual.clone(), x)));
    EXPECT_TRUE(at::equal(maps.linear->Logits(x, 5), training.narrow(1, 0, 5)));
    EXPECT_TRUE(at::equal(inferring.Logits(x, 5), training.narrow(1, 0, 5)));
    EXPECT_TRUE(at::equal(maps.linear->BaseFloat32(x), inferring.BaseFloat32(x)));
    for (int64_t row = 0; row < x.size(0); ++row) {
      EXPECT_TRUE(at::equal(inferring.Forward(x.narrow(0, row, 1)), training.narrow(0, row, 1)));
    }
    for (const at::Tensor& weight : maps.weights) weight.add_(0.3);
    EXPECT_THROW(maps.linear->Forward(x), c10::Error) << "stale";
    maps.linear->OnWeightsChanged();
  }
}

// Products of rounded factors, not rounded themselves: sums of at most 12 numbers near 1.
TEST(LinearWeightTest, MapsThatRoundInputsHaveTheGradientsOfRoundedProducts) {
  const Maps maps = RoundingMaps();
  const at::Tensor x = at::randn({7, 12}).requires_grad_(), dy = at::randn({7, 8});
  const at::Tensor y = maps.linear->Forward(x);
  y.backward(dy);
  const auto rounded = [](const at::Tensor& of) {
    return of.detach().to(at::kBFloat16).to(at::kDouble);
  };
  const auto error = [](const at::Tensor& a, const at::Tensor& b) {
    return (a.to(at::kDouble) - b).abs().max().item<double>();
  };
  const at::Tensor w = rounded(maps.stacked), narrow_dy = rounded(dy);
  EXPECT_LE(error(y.detach(), rounded(x).mm(w.t()) + maps.bias.to(at::kDouble)), 1e-5);
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_LE(error(x.grad(), narrow_dy.mm(w)), 1e-5);
  const at::Tensor of_weights = narrow_dy.t().mm(rounded(x));
  EXPECT_LE(error(maps.weights[0].grad(), of_weights.narrow(0, 0, 5)), 1e-5);
  EXPECT_LE(error(maps.weights[1].grad(), of_weights.narrow(0, 5, 3)), 1e-5);
  EXPECT_EQ(maps.weights[0].grad().scalar_type(), at::kFloat);
  EXPECT_LE(error(maps.biases[1].grad(), dy.to(at::kDouble).sum(0).narrow(0, 5, 3)), 1e-5);
}

TEST(LinearWeightTest, ForwardAddAddsToTheResidual) {
  at::manual_seed(4);
  const at::Tensor weight = at::randn({6, 12}), x = at::randn({3, 12}),
                   residual = at::randn({3, 6});
  const LinearWeight linear(weight, {}, {weight}, {}, at::kFloat);
  const at::Tensor training = linear.ForwardAdd(residual, x);
  EXPECT_LE(MaxError(training, residual + at::linear(x, weight)), 1e-5);
  const at::NoGradGuard no_grad;
  const at::Tensor target = residual.clone();
  EXPECT_TRUE(linear.ForwardAdd(target, x).is_same(target));
  EXPECT_LE(MaxError(target, training), 1e-5);
}

}  // namespace
}  // namespace tandem::ops
