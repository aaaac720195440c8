// Adapters train under every layout as in one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/megatron/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/parallel/testing/same_training.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/tiny_kinds.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

LoadOptions Adapted(const TinyKind& kind) {
  LoadOptions load = LoadOf(kind);
  load.lora = {.rank = 3, .alpha = 6, .target_modules = {kAllLinear}, .seed = 5};
  return load;
}

// Prepares `strategy`, trains it beside one process and compares the two.
void ExpectTrainsLikeOneProcess(Strategy& strategy, const Ranks& ranks, const std::string& model,
                                const TinyKind& kind) {
  SCOPED_TRACE(NameOf(kind));
  SingleStrategy single;
  Prepare(strategy, model, Adapted(kind), SteadyOptimizer());
  Prepare(single, model, Adapted(kind), SteadyOptimizer());
  const NamedTensors before = WholeParameters(single);
  ExpectSameNumbers(Steps(strategy, 2, kMicroBatches), Steps(single, 2, kMicroBatches));
  const NamedTensors parameters = WholeParameters(strategy), expected = WholeParameters(single);
  if (ranks->rank() == 0) ExpectSameParameters(parameters, expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Parameter* const parameter = &single.model().DeclaredParameters()[i];
    EXPECT_EQ(at::equal(before[i].second, expected[i].second), !parameter->trainable)
        << expected[i].first;
  }
}

class ZeroAdaptersTest : public ::testing::TestWithParam<int> {};

TEST_P(ZeroAdaptersTest, TrainLikeThoseOfOneProcess) {
  for (const TinyKind& kind : {TinyKind{"qwen2", true, false}, TinyKind{"llama", true, true},
                               TinyKind{"qwen3_moe", false, false}}) {
    ranks::RunConnected(2, [&](const Ranks& ranks) {
      const TemporaryFolder folder;
      WriteTinyModel(folder / "model", 3, {{"tie_word_embeddings", kind.tied}}, kind.family);
      ZeroStrategy zero(ZeroOfStage(GetParam()), ranks);
      ExpectTrainsLikeOneProcess(zero, ranks, folder / "model", kind);
      // Only what trains has gradients and a state.
      int64_t trained = 0;
      for (const Parameter& parameter : zero.model().DeclaredParameters()) {
        if (parameter.value.grad().defined()) trained += parameter.spec.numel();
        EXPECT_EQ(parameter.value.grad().defined(), parameter.trainable);
      }
      EXPECT_EQ(trained, zero.model().num_trainable_parameters());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, ZeroAdaptersTest, testing::Values(1, 2, 3));

class MegatronAdaptersTest : public ::testing::TestWithParam<MegatronLayout> {};

TEST_P(MegatronAdaptersTest, TrainLikeThoseOfOneProcess) {
  const MegatronLayout& layout = GetParam();
  const bool experts = layout.options.expert_model_parallel_size > 1;
  ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
    for (const TinyKind& kind : experts ? ExpertKinds() : OneKindOfEachFamily()) {
      const TemporaryFolder folder;
      WriteLayoutModel(folder / "model", kind);
      MegatronStrategy strategy(layout.options, ranks);
      ExpectTrainsLikeOneProcess(strategy, ranks, folder / "model", kind);
    }
  });
}

std::vector<MegatronLayout> Layouts() {
  std::vector<MegatronLayout> layouts;
  for (const MegatronLayout& layout : MegatronLayouts()) {
    if (layout.ranks == 2) layouts.push_back(layout);
  }
  for (const MegatronLayout& layout : ExpertLayouts()) {
    if (std::string(layout.name) == "Ep2" || std::string(layout.name) == "Ep2Tp2") {
      layouts.push_back(layout);
    }
  }
  return layouts;
}

INSTANTIATE_TEST_SUITE_P(Layouts, MegatronAdaptersTest, testing::ValuesIn(Layouts()), LayoutName);

}  // namespace
}  // namespace tandem::parallel
