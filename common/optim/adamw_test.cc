#include "common/optim/adamw.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace tandem::training {
namespace {

OptimizerOptions Options() {
  // The rate comes with every step, and the strategies clip.
  return {.learning_rate = 0,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .epsilon = 1e-8,
          .max_grad_norm = 0,
          .weight_decay = 0.1};
}

std::vector<AdamWParameter> WholeParameters(const NamedTensors& parameters) {
  std::vector<AdamWParameter> result;
  for (const auto& [name, values] : parameters) {
    result.push_back({.name = name, .values = values, .decays = DecaysWeight(values.dim())});
  }
  return result;
}

TEST(AdamWTest, EqualsTorchOptimAdamW) {
  // Three steps of torch.optim.AdamW (2.11) with lr 0.01 and decay 0.1 on the matrix, 0 on the
  // bias.
  NamedTensors parameters = {{"w", at::tensor({0.5f, -1.25f, 2.0f, 0.125f}).view({2, 2})},
                             {"b", at::tensor({0.75f, -0.5f})}};
  AdamW optimizer(WholeParameters(parameters), Options());
  for (int i = 1; i <= 3; ++i) {
    optimizer.Step(
        {at::tensor({0.1f, -0.2f, 0.3f, 4.0f}).view({2, 2}) * i, at::tensor({-1.0f, 0.001f}) * i},
        0.01);
  }
  const at::Tensor w = at::tensor({0.469506115f, -1.21725833f, 1.96501076f, 0.0956299901f});
  const at::Tensor b = at::tensor({0.779024899f, -0.52902472f});
  EXPECT_LT((parameters[0].second.view({4}) - w).abs().max().item<float>(), 2e-7);
  EXPECT_LT((parameters[1].second - b).abs().max().item<float>(), 2e-7);
}

TEST(AdamWTest, EqualsTheDefinitionInDouble) {
  at::manual_seed(3);
  const NamedTensors parameters = {{"w", at::randn({3, 5})}};
  const at::Tensor start = parameters[0].second.to(at::kDouble);
  AdamW optimizer(WholeParameters(parameters), Options());
  at::Tensor p = start.clone(), m = at::zeros_like(p), v = at::zeros_like(p);
  for (int t = 1; t <= 20; ++t) {
    const at::Tensor g = at::randn({3, 5});
    optimizer.Step({g}, 1e-2);
    const at::Tensor d = g.to(at::kDouble);
    p = p * (1 - 1e-2 * 0.1);
    m = 0.9 * m + 0.1 * d;
    v = 0.95 * v + 0.05 * d * d;
    p = p - 1e-2 * (m / (1 - std::pow(0.9, t))) / ((v / (1 - std::pow(0.95, t))).sqrt() + 1e-8);
  }
  EXPECT_LT((parameters[0].second.to(at::kDouble) - p).abs().max().item<double>(), 1e-6);
}

TEST(AdamWTest, AStepMayHaveOtherNumbers) {
  at::manual_seed(3);
  const NamedTensors a = {{"w", at::randn({3, 5})}}, b = {{"w", a[0].second.clone()}};
  const at::Tensor g = at::randn({3, 5});
  OptimizerOptions others = Options();
  others.beta1 = 0.5;
  others.beta2 = 0.6;
  others.epsilon = 1e-2;
  others.weight_decay = 0.25;
  AdamW configured(WholeParameters(a), Options()), of_others(WholeParameters(b), others);
  for (int step = 0; step < 2; ++step) {
    configured.Step({g}, 1e-2, others);
    of_others.Step({g}, 1e-2);
  }
  EXPECT_TRUE(a[0].second.equal(b[0].second));
  configured.Step({g}, 1e-2);
  of_others.Step({g}, 1e-2);
  EXPECT_FALSE(a[0].second.equal(b[0].second));
}

TEST(AdamWTest, StateRoundTripContinuesIdentically) {
  at::manual_seed(3);
  const NamedTensors a = {{"w", at::randn({3, 5})}};
  AdamW first(WholeParameters(a), Options());
  const at::Tensor g1 = at::randn({3, 5}), g2 = at::randn({3, 5});
  first.Step({g1}, 1e-2);
  const NamedTensors b = {{"w", a[0].second.clone()}};
  AdamW second(WholeParameters(b), Options());
  ASSERT_TRUE(second.LoadState(first.State()).ok());
  EXPECT_EQ(second.steps(), 1);
  first.Step({g2}, 1e-2);
  second.Step({g2}, 1e-2);
  EXPECT_TRUE(a[0].second.equal(b[0].second));
}

TEST(AdamWTest, StateThatDoesNotFitIsRefused) {
  AdamW optimizer(WholeParameters({{"w", at::zeros({3})}}), Options());
  NamedTensors state = optimizer.State();
  NamedTensors frozen_now = state;
  frozen_now.emplace_back("b.exp_avg", at::zeros({3}));
  const absl::Status unexpected = optimizer.LoadState(frozen_now);
  EXPECT_EQ(unexpected.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(std::string(unexpected.message()).find("'b.exp_avg'"), std::string::npos);
  state[0].second = at::zeros({4});
  EXPECT_EQ(optimizer.LoadState(state).code(), absl::StatusCode::kDataLoss);
  state.erase(state.begin());
  EXPECT_EQ(optimizer.LoadState(state).code(), absl::StatusCode::kDataLoss);
}

TEST(AdamWTest, StateThatNoUpdateLeavesIsRefused) {
  AdamW optimizer(WholeParameters({{"w", at::zeros({3})}}), Options());
  const auto status_with = [&](const std::string& name, const at::Tensor& value) {
    NamedTensors state = optimizer.State();
    for (auto& [key, tensor] : state) tensor = key == name ? value : tensor.clone();
    return optimizer.LoadState(state);
  };
  const std::vector<std::pair<std::string, at::Tensor>> cases = {
      {"w.exp_avg", at::full({3}, NAN)},
      {"w.exp_avg", at::full({3}, -INFINITY)},
      {"w.exp_avg_sq", at::full({3}, INFINITY)},
      {"w.exp_avg_sq", at::full({3}, -1e-30)},
      {"optimizer.steps", at::scalar_tensor(-1, at::kLong)},
      {"optimizer.steps", at::scalar_tensor(std::numeric_limits<int64_t>::max(), at::kLong)}};
  for (const auto& [name, value] : cases) {
    const absl::Status status = status_with(name, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << name;
    EXPECT_NE(std::string(status.message()).find("'" + name + "'"), std::string::npos) << status;
  }
  EXPECT_EQ(optimizer.steps(), 0);
  EXPECT_TRUE(status_with("w.exp_avg", at::full({3}, -1.0)).ok());
}

TEST(AdamWTest, AResetOptimizerIsANewOne) {
  at::manual_seed(3);
  const NamedTensors a = {{"w", at::randn({3, 5})}}, b = {{"w", a[0].second.clone()}};
  const at::Tensor g = at::randn({3, 5});
  AdamW used(WholeParameters(a), Options()), fresh(WholeParameters(b), Options());
  used.Step({g}, 1e-2);
  a[0].second.copy_(b[0].second);
  used.Reset();
  EXPECT_EQ(used.steps(), 0);
  used.Step({g}, 1e-2);
  fresh.Step({g}, 1e-2);
  EXPECT_TRUE(a[0].second.equal(b[0].second));
}

TEST(AdamWTest, GlobalNormIsTheNormOfEverything) {
  EXPECT_NEAR(GlobalNorm({at::tensor({3.0f}), at::tensor({0.0f, 4.0f})}), 5.0, 1e-6);
}

}  // namespace
}  // namespace tandem::training
