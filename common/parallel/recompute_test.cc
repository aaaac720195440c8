// Activation recomputation under every strategy.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "common/parallel/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero_strategy.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;
using MakeStrategy = std::function<std::unique_ptr<Strategy>(const Ranks&, Recompute)>;

void ExpectTheSameBits(int ranks_count, const MakeStrategy& make) {
  ranks::RunConnected(ranks_count, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model");
    std::vector<NamedTensors> results;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      const auto strategy = make(ranks, recompute);
      Prepare(*strategy, folder / "model", {}, SteadyOptimizer());
      Steps(*strategy, 2, kMicroBatches);
      results.push_back(WholeParameters(*strategy));
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[0][i].second.equal(results[1][i].second)) << results[0][i].first;
      EXPECT_TRUE(results[0][i].second.equal(results[2][i].second)) << results[0][i].first;
    }
  });
}

TEST(RecomputeTest, ChangesNoBitInOneProcess) {
  ExpectTheSameBits(1, [](const Ranks&, Recompute recompute) {
    return std::make_unique<SingleStrategy>(recompute);
  });
}

TEST(RecomputeTest, ChangesNoBitUnderZero) {
  for (const int stage : {1, 3}) {
    ExpectTheSameBits(2, [stage](const Ranks& ranks, Recompute recompute) {
      return std::make_unique<ZeroStrategy>(ZeroOfStage(stage), ranks, recompute);
    });
  }
}

TEST(RecomputeTest, ChangesNoBitUnderMegatron) {
  for (const MegatronLayout& layout : MegatronLayouts()) {
    if (layout.ranks != 2) continue;
    SCOPED_TRACE(layout.name);
    ExpectTheSameBits(2, [&](const Ranks& ranks, Recompute recompute) {
      return std::make_unique<MegatronStrategy>(layout.options, ranks, recompute);
    });
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
