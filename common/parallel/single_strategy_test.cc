#include "common/parallel/single_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/model/testing/models.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/create_strategy.h"
#include "common/parallel/testing/strategy_runs.h"

namespace tandem::parallel {
namespace {

constexpr char kMatrix[] = "model.layers.0.mlp.down_proj.weight";
constexpr char kNorm[] = "model.norm.weight";

std::unique_ptr<Model> TrainableModel(const LoadOptions& changes = {}) {
  LoadOptions options = changes;
  options.requires_grad = true;
  return TinyModel("llama", {}, options);
}

RaggedBatch Input(int64_t) { return MakeRaggedBatch({{1, 2, 3}}); }

// Adds the gradients of |w|^2 * factor + i * sum(norm) for i = 0, 1; hidden states have none.
absl::Status RunBackward(SingleStrategy& strategy, double factor = 1) {
  return strategy.ForwardBackward(
      2, Input,
      [&](int64_t i, const RaggedBatch&, const at::Tensor&) -> absl::StatusOr<at::Tensor> {
        const at::Tensor w = strategy.model().Parameter(kMatrix);
        const at::Tensor loss = (w * w).sum() * factor +
                                strategy.model().Parameter(kNorm).sum() * static_cast<double>(i);
        loss.backward();
        return at::Tensor();
      });
}

TEST(SingleStrategyTest, GradientsOfMicroBatchesAddUpAndAreZeroedBefore) {
  SingleStrategy strategy(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_TRUE(RunBackward(strategy).ok());
    EXPECT_TRUE(strategy.Gradient(kMatrix).equal(4 * strategy.model().Parameter(kMatrix).detach()));
    EXPECT_EQ(strategy.Gradient(kNorm)[3].item<float>(), 1.0f);
  }
  EXPECT_FALSE(strategy.Gradient("x").defined());
}

TEST(SingleStrategyTest, ClipsByGlobalNormAndReportsIt) {
  SingleStrategy strategy(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  ASSERT_TRUE(RunBackward(strategy).ok());
  const double matrix = 4 * strategy.model().Parameter(kMatrix).norm().item<double>();
  const OptimizerReport report = strategy.OptimizerStep({}).value();
  EXPECT_NEAR(report.grad_norm, std::sqrt(matrix * matrix + 30), 1e-4);
  EXPECT_NEAR(training::GlobalNorm({strategy.Gradient(kMatrix), strategy.Gradient(kNorm)}), 0.5,
              1e-6);
  EXPECT_EQ(strategy.optimizer_steps(), 1);
}

// As with gradients of zero in torch.optim.AdamW, which skips gradients of None.
TEST(SingleStrategyTest, AStepWithoutImagesMovesATowerByWeightDecayAlone) {
  constexpr char kTower[] = "visual.blocks.0.attn.proj.weight",
                 kTowerNorm[] = "visual.merger.ln_q.weight";
  for (const double weight_decay : {0.0, 0.1}) {
    SingleStrategy strategy(TinyModel("qwen2_vl", {}, {.requires_grad = true}));
    OptimizerOptions options = FastOptimizer();
    options.weight_decay = weight_decay;
    ASSERT_TRUE(strategy.BuildOptimizer(options).ok());
    const at::Tensor before = strategy.model().Parameter(kTower).detach().clone(),
                     norm = strategy.model().Parameter(kTowerNorm).detach().clone();
    ASSERT_TRUE(RunBackward(strategy).ok());
    ASSERT_TRUE(strategy.OptimizerStep({}).ok());
    const at::Tensor expected = before * (1 - options.learning_rate * weight_decay);
    EXPECT_TRUE(at::allclose(strategy.model().Parameter(kTower), expected, 1e-6, 0));
    EXPECT_EQ(strategy.model().Parameter(kTower).equal(before), weight_decay == 0);
    EXPECT_TRUE(strategy.model().Parameter(kTowerNorm).equal(norm));
  }
}

TEST(SingleStrategyTest, NonFiniteGradientChangesNothing) {
  SingleStrategy strategy(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  const at::Tensor before = strategy.model().Parameter(kMatrix).detach().clone();
  ASSERT_TRUE(RunBackward(strategy, std::numeric_limits<double>::infinity()).ok());
  EXPECT_TRUE(IsNotFinite(strategy.OptimizerStep({}).status()));
  EXPECT_TRUE(strategy.model().Parameter(kMatrix).equal(before));
  EXPECT_EQ(strategy.optimizer_steps(), 0);
}

TEST(SingleStrategyTest, ExceptionOfTorchBecomesAStatus) {
  SingleStrategy strategy(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  const absl::Status status = strategy.ForwardBackward(
      1, Input, [](int64_t, const RaggedBatch&, const at::Tensor&) -> absl::StatusOr<at::Tensor> {
        return at::zeros({2}).add_(at::zeros({3}));
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

TEST(SingleStrategyTest, SavedStateContinuesBitForBit) {
  const TemporaryFolder folder;
  SingleStrategy first(TrainableModel()), second(TrainableModel());
  ASSERT_TRUE(first.BuildOptimizer(FastOptimizer()).ok());
  ASSERT_TRUE(second.BuildOptimizer(FastOptimizer()).ok());
  ASSERT_TRUE(RunBackward(first).ok());
  ASSERT_TRUE(first.OptimizerStep({}).ok());
  ASSERT_TRUE(first.SaveOptimizer(folder.path()).ok());
  ASSERT_TRUE(second.LoadOptimizer(folder.path()).ok());
  ASSERT_TRUE(second.LoadParameters(WholeParameters(first)).ok());
  ASSERT_TRUE(RunBackward(first).ok());
  ASSERT_TRUE(RunBackward(second).ok());
  ASSERT_TRUE(first.OptimizerStep({}).ok());
  ASSERT_TRUE(second.OptimizerStep({}).ok());
  for (const char* name : {kMatrix, kNorm}) {
    EXPECT_TRUE(first.model().Parameter(name).equal(second.model().Parameter(name)));
  }
}

TEST(SingleStrategyTest, LoadParametersIsAllOrNothing) {
  SingleStrategy strategy(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  const at::Tensor before = strategy.model().Parameter(kMatrix).detach().clone();
  EXPECT_FALSE(strategy.LoadParameters({{kMatrix, at::zeros_like(before)}}).ok());
  EXPECT_TRUE(strategy.model().Parameter(kMatrix).equal(before));
}

TEST(SingleStrategyTest, FrozenParametersKeepTheirBitsAndHaveNoState) {
  const TemporaryFolder folder;
  SingleStrategy strategy(TrainableModel({.freeze = {"*norm*"}})), other(TrainableModel());
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  ASSERT_TRUE(other.BuildOptimizer(FastOptimizer()).ok());
  EXPECT_FALSE(strategy.Gradient(kNorm).defined());
  EXPECT_TRUE(strategy.Gradient(kMatrix).defined());
  const at::Tensor norm = strategy.model().Parameter(kNorm).clone();
  const at::Tensor matrix = strategy.model().Parameter(kMatrix).detach().clone();
  ASSERT_TRUE(RunBackward(strategy).ok());
  ASSERT_TRUE(strategy.OptimizerStep({}).ok());
  EXPECT_TRUE(strategy.model().Parameter(kNorm).equal(norm));
  EXPECT_FALSE(strategy.model().Parameter(kMatrix).equal(matrix));
  EXPECT_EQ(WholeParameters(strategy).size(), strategy.model().Parameters().size());
  // The state saved under one `freeze` does not fit another, in either direction.
  ASSERT_TRUE(strategy.SaveOptimizer(folder.path()).ok());
  absl::Status status = other.LoadOptimizer(folder.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(std::string(status.message()).find("norm.weight.exp_avg'"), std::string::npos);
  ASSERT_TRUE(other.SaveOptimizer(folder.path()).ok());
  status = strategy.LoadOptimizer(folder.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(std::string(status.message()).find("norm.weight.exp_avg'"), std::string::npos);
}

TEST(SingleStrategyTest, AModelThatDoesNotTrainIsRefused) {
  EXPECT_EQ(SingleStrategy(TinyModel()).BuildOptimizer(FastOptimizer()).code(),
            absl::StatusCode::kInvalidArgument);
}

// Updates and loads refresh the bf16 copies that products use.
void ExpectCopiesToFollowUpdatesAndLoads(const Placement& placement) {
  const auto copy = TinyModel("llama", {}, {.placement = placement}, /*seed=*/9);
  SingleStrategy strategy(TrainableModel({.freeze = {"*norm*"}, .placement = placement}));
  ASSERT_TRUE(strategy.BuildOptimizer(FastOptimizer()).ok());
  const auto expect_same_forward = [&] {
    ASSERT_TRUE(copy->LoadParameters(WholeParameters(strategy)).ok());
    const at::NoGradGuard no_grad;
    CausalContext context;
    const RaggedBatch batch = MakeRaggedBatch({{1, 2, 3, 4}});
    EXPECT_TRUE(
        at::equal(strategy.model().ForwardLogits(strategy.model().HiddenStates(batch, context)),
                  copy->ForwardLogits(copy->HiddenStates(batch, context))));
  };
  expect_same_forward();
  ASSERT_TRUE(RunBackward(strategy).ok());
  ASSERT_TRUE(strategy.OptimizerStep({}).ok());
  expect_same_forward();
  const auto other = TinyModel("llama", {}, {}, /*seed=*/5);
  ASSERT_TRUE(strategy.LoadParameters(other->Parameters()).ok());
  expect_same_forward();
}

TEST(SingleStrategyTest, ComputeCopiesFollowUpdatesAndLoads) {
  ExpectCopiesToFollowUpdatesAndLoads({.dtype = at::kBFloat16});
}

TEST(SingleStrategyTest, RoundedCopiesFollowUpdatesAndLoads) {
  ExpectCopiesToFollowUpdatesAndLoads({.weight_dtype = at::kBFloat16});
}

TEST(StrategyTest, EveryNameIsCreatedAndOthersAreRefused) {
  const auto alone = ranks::Communicator::Alone();
  EXPECT_TRUE(CreateStrategy({.name = "single"}, alone).ok());
  EXPECT_TRUE(CreateStrategy({.name = "zero"}, alone).ok());
  EXPECT_TRUE(CreateStrategy({.name = "megatron"}, alone).ok());
  EXPECT_EQ(FieldPath(CreateStrategy({.name = "nonsense"}, alone).status()), "strategy.name");
}

}  // namespace
}  // namespace tandem::parallel
