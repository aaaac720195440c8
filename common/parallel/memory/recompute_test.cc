// Activation recomputation under every strategy.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "common/parallel/megatron/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;
using MakeStrategy = std::function<std::unique_ptr<Strategy>(const Ranks&, Recompute)>;

void ExpectTheSameBits(int ranks_count, const MakeStrategy& make, const TinyKind& kind = {}) {
  ranks::RunConnected(ranks_count, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", kind);
    std::vector<NamedTensors> results;
    std::vector<double> router_losses;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      const auto strategy = make(ranks, recompute);
      Prepare(*strategy, folder / "model", {}, SteadyOptimizer());
      router_losses.push_back(Steps(*strategy, 2, kMicroBatches)[1].router_loss);
      results.push_back(WholeParameters(*strategy));
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[0][i].second.equal(results[1][i].second)) << results[0][i].first;
      EXPECT_TRUE(results[0][i].second.equal(results[2][i].second)) << results[0][i].first;
    }
    // A layer that runs again counts once.
    for (const double loss : router_losses) EXPECT_EQ(loss, router_losses[0]);
  });
}

TEST(RecomputeTest, ChangesNoBitInOneProcess) {
  ExpectTheSameBits(1, [](const Ranks&, Recompute recompute) {
    return std::make_unique<SingleStrategy>(recompute);
  });
}

TEST(RecomputeTest, ChangesNoBitOfExperts) {
  ExpectTheSameBits(
      1,
      [](const Ranks&, Recompute recompute) { return std::make_unique<SingleStrategy>(recompute); },
      {.family = "mixtral"});
  ExpectTheSameBits(
      2,
      [](const Ranks& ranks, Recompute recompute) {
        return std::make_unique<MegatronStrategy>(
            MegatronOptions{.context_parallel_size = 2, .use_distributed_optimizer = true}, ranks,
            recompute);
      },
      {.family = "mixtral"});
}

TEST(RecomputeTest, ChangesNoBitUnderZero) {
  for (const int stage : {1, 3}) {
    ExpectTheSameBits(2, [stage](const Ranks& ranks, Recompute recompute) {
      return std::make_unique<ZeroStrategy>(ZeroOfStage(stage), ranks, recompute);
    });
  }
}

TEST(RecomputeTest, ChangesNoBitUnderMegatron) {
  std::vector<MegatronLayout> layouts = MegatronLayouts();
  for (const MegatronLayout& layout : ExpertLayouts()) layouts.push_back(layout);
  for (const MegatronLayout& layout : layouts) {
    if (layout.ranks != 2) continue;
    SCOPED_TRACE(layout.name);
    ExpectTheSameBits(
        2,
        [&](const Ranks& ranks, Recompute recompute) {
          return std::make_unique<MegatronStrategy>(layout.options, ranks, recompute);
        },
        KindsOf(layout).front());
  }
}

// Between forward and backward a layer keeps its input alone.
TEST(RecomputeTest, FullKeepsNoGraphOfALayer) {
  ranks::RunConnected(1, [](const Ranks&) {
    const auto model = TinyModel("llama", {}, {.requires_grad = true});
    const at::Tensor norm = model->Parameter("model.layers.0.input_layernorm.weight");
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      BlockPass pass(*model, MakeRaggedBatch({{1, 2, 3}}), std::make_unique<CausalContext>(),
                     recompute);
      const auto before = norm.use_count();
      const at::Tensor embedded = pass.Forward(0, {}), hidden = pass.Forward(1, embedded);
      EXPECT_EQ(norm.use_count() > before, recompute == Recompute::kNone);
      norm.mutable_grad().reset();
      pass.BackwardAll(at::ones_like(hidden));
      EXPECT_GT(norm.grad().abs().max().item<double>(), 0);
    }
  });
}

}  // namespace
}  // namespace tandem::parallel
