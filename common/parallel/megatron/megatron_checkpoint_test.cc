// Checkpoints of the optimizer between layouts.
#include <gtest/gtest.h>

#include <filesystem>
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

struct Saved {
  const char* name;
  int ranks;
  std::function<std::unique_ptr<Strategy>(const Ranks&)> make;
};

std::function<std::unique_ptr<Strategy>(const Ranks&)> Megatron(const MegatronOptions& options) {
  return [options](const Ranks& ranks) -> std::unique_ptr<Strategy> {
    return std::make_unique<MegatronStrategy>(options, ranks);
  };
}

const Saved kSingle = {"single", 1,
                       [](const Ranks&) { return std::make_unique<SingleStrategy>(); }};
const Saved kZero = {"zero", 2, [](const Ranks& ranks) {
                       return std::make_unique<ZeroStrategy>(ZeroOfStage(2), ranks);
                     }};

// Training continues from a checkpoint of any of the layouts under any other.
void ExpectEachLoadsEach(const std::vector<Saved>& layouts, const TinyKind& kind) {
  const TemporaryFolder folder;
  for (const Saved& saved : layouts) {
    std::filesystem::create_directories(folder / saved.name);
    ranks::RunConnected(saved.ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteLayoutModel(own / "model", kind);
      const auto strategy = saved.make(ranks);
      Prepare(*strategy, own / "model", {}, SteadyOptimizer());
      Steps(*strategy, 2, kMicroBatches);
      EXPECT_TRUE(strategy->SaveOptimizer(folder / saved.name).ok());
      const NamedTensors parameters = WholeParameters(*strategy);
      if (ranks->rank() != 0) return;
      SingleStrategy whole;
      Prepare(whole, own / "model");
      EXPECT_TRUE(whole.LoadParameters(parameters).ok());
      EXPECT_TRUE(whole.model().Save(folder / saved.name).ok());
    });
  }
  for (const Saved& layout : layouts) {
    ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteLayoutModel(own / "model", kind);
      const auto expected = ComputeOnRankZero(*ranks, [&] {
        SingleStrategy single;
        Prepare(single, own / "model", {}, SteadyOptimizer());
        Steps(single, 2, kMicroBatches);
        return std::vector<StepNumbers>{Step(single, kMicroBatches, 2),
                                        Step(single, kMicroBatches, 3)};
      });
      for (const Saved& saved : layouts) {
        SCOPED_TRACE(testing::Message() << saved.name << " under " << layout.name);
        const auto loaded = layout.make(ranks);
        Prepare(*loaded, folder / saved.name, {}, SteadyOptimizer());
        const absl::Status status = loaded->LoadOptimizer(folder / saved.name);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(loaded->optimizer_steps(), 2);
        const std::vector<StepNumbers> steps = {Step(*loaded, kMicroBatches, 2),
                                                Step(*loaded, kMicroBatches, 3)};
        ExpectSameNumbers(steps, expected);
      }
    });
  }
}

TEST(MegatronCheckpointTest, ACheckpointOfAnyLayoutLoadsUnderAnyOther) {
  ExpectEachLoadsEach(
      {kSingle,
       kZero,
       {"tp2", 2, Megatron({.tensor_model_parallel_size = 2, .use_distributed_optimizer = true})},
       {"pp2", 2, Megatron({.pipeline_model_parallel_size = 2, .use_distributed_optimizer = true})},
       {"dp2 without sharing", 2, Megatron({})},
       {"tp2dp2", 4,
        Megatron({.tensor_model_parallel_size = 2, .use_distributed_optimizer = true})}},
      {"qwen2", true, false});
}

TEST(MegatronCheckpointTest, ACheckpointOfAnyDivisionOfExpertsLoadsUnderAnyOther) {
  ExpectEachLoadsEach(
      {kSingle,
       kZero,
       {"tp2", 2, Megatron({.tensor_model_parallel_size = 2, .use_distributed_optimizer = true})},
       {"ep2", 2, Megatron({.expert_model_parallel_size = 2, .use_distributed_optimizer = true})},
       {"ep2tp2", 4,
        Megatron({.tensor_model_parallel_size = 2,
                  .expert_model_parallel_size = 2,
                  .use_distributed_optimizer = true})},
       {"ep2 of 4 without sharing", 4, Megatron({.expert_model_parallel_size = 2})}},
      {"qwen3_moe", false, false});
}

}  // namespace
}  // namespace tandem::parallel
