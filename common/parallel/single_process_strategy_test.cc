#include "common/parallel/single_process_strategy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "common/base/error.h"

namespace tandem::parallel {
namespace {

NamedTensors Parameters() {
  return {{"w", at::tensor({1.0f, 2.0f, 3.0f, 4.0f}).view({2, 2}).requires_grad_()},
          {"b", at::tensor({0.5f}).requires_grad_()}};
}

absl::Status RunBackward(SingleProcessStrategy& strategy, const NamedTensors& parameters,
                         double factor = 1) {
  return strategy.ForwardBackward(2, [&](int64_t i) {
    const at::Tensor loss = (parameters[0].second * parameters[0].second).sum() * factor +
                            parameters[1].second.sum() * static_cast<double>(i);
    loss.backward();
    return absl::OkStatus();
  });
}

TEST(SingleProcessStrategyTest, GradientsOfMicroBatchesAddUpAndAreZeroedBefore) {
  const NamedTensors parameters = Parameters();
  SingleProcessStrategy strategy;
  ASSERT_TRUE(strategy.Build(parameters, {}).ok());
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_TRUE(RunBackward(strategy, parameters).ok());
    EXPECT_TRUE(strategy.Gradient("w").equal(4 * parameters[0].second.detach()));
    EXPECT_EQ(strategy.Gradient("b").item<float>(), 1.0f);
  }
  EXPECT_FALSE(strategy.Gradient("x").defined());
}

TEST(SingleProcessStrategyTest, ClipsByGlobalNormAndReportsIt) {
  const NamedTensors parameters = Parameters();
  SingleProcessStrategy strategy;
  OptimizerOptions options;
  options.max_grad_norm = 0.5;
  ASSERT_TRUE(strategy.Build(parameters, options).ok());
  ASSERT_TRUE(RunBackward(strategy, parameters).ok());
  const OptimizerReport report = strategy.OptimizerStep().value();
  EXPECT_NEAR(report.grad_norm, std::sqrt(16.0 * 30 + 1), 1e-5);
  EXPECT_NEAR(training::GlobalNorm({strategy.Gradient("w"), strategy.Gradient("b")}), 0.5, 1e-6);
  EXPECT_EQ(strategy.optimizer_steps(), 1);
}

TEST(SingleProcessStrategyTest, NonFiniteGradientChangesNothing) {
  const NamedTensors parameters = Parameters();
  SingleProcessStrategy strategy;
  ASSERT_TRUE(strategy.Build(parameters, {}).ok());
  const at::Tensor before = parameters[0].second.detach().clone();
  ASSERT_TRUE(RunBackward(strategy, parameters, std::numeric_limits<double>::infinity()).ok());
  EXPECT_EQ(strategy.OptimizerStep().status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(parameters[0].second.equal(before));
  EXPECT_EQ(strategy.optimizer_steps(), 0);
}

TEST(SingleProcessStrategyTest, ExceptionOfTorchBecomesAStatus) {
  SingleProcessStrategy strategy;
  ASSERT_TRUE(strategy.Build(Parameters(), {}).ok());
  const absl::Status status = strategy.ForwardBackward(1, [](int64_t) {
    at::zeros({2}).add_(at::zeros({3}));
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

TEST(SingleProcessStrategyTest, SavedStateContinuesBitForBit) {
  const std::string directory =
      (std::filesystem::temp_directory_path() / ("tandem_strategy_" + std::to_string(::getpid())))
          .string();
  std::filesystem::create_directories(directory);
  const NamedTensors a = Parameters(), b = Parameters();
  SingleProcessStrategy first, second;
  ASSERT_TRUE(first.Build(a, {}).ok());
  ASSERT_TRUE(second.Build(b, {}).ok());
  ASSERT_TRUE(RunBackward(first, a).ok());
  ASSERT_TRUE(first.OptimizerStep().ok());
  ASSERT_TRUE(first.SaveOptimizer(directory).ok());
  ASSERT_TRUE(second.LoadOptimizer(directory).ok());
  ASSERT_TRUE(second.ScatterParameters(first.GatherParameters().value()).ok());
  for (auto* pair : {&a, &b}) {
    SingleProcessStrategy& strategy = pair == &a ? first : second;
    ASSERT_TRUE(RunBackward(strategy, *pair).ok());
    ASSERT_TRUE(strategy.OptimizerStep().ok());
  }
  EXPECT_TRUE(a[0].second.equal(b[0].second));
  EXPECT_TRUE(a[1].second.equal(b[1].second));
  std::filesystem::remove_all(directory);
}

TEST(SingleProcessStrategyTest, ScatterIsAllOrNothing) {
  const NamedTensors parameters = Parameters();
  SingleProcessStrategy strategy;
  ASSERT_TRUE(strategy.Build(parameters, {}).ok());
  EXPECT_FALSE(strategy.ScatterParameters({{"w", at::zeros({2, 2})}}).ok());
  EXPECT_EQ(parameters[0].second[0][0].item<float>(), 1.0f);
}

TEST(StrategyTest, OthersAreNotThereYet) {
  EXPECT_TRUE(CreateStrategy("single").ok());
  EXPECT_EQ(CreateStrategy("zero").status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(CreateStrategy("nonsense").status()), "strategy.name");
}

}  // namespace
}  // namespace tandem::parallel
