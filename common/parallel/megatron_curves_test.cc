// Twenty steps of the `megatron` strategy in every layout against one process.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/parallel/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/parallel/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

class MegatronCurvesTest : public ::testing::TestWithParam<MegatronLayout> {};

TEST_P(MegatronCurvesTest, TwentyStepsAreThoseOfOneProcess) {
  const MegatronLayout& layout = GetParam();
  RunConnected(layout.ranks, [&](const std::shared_ptr<Communicator>& ranks) {
    for (const TinyKind& kind : {TinyKind{"qwen2", true, false}, TinyKind{"qwen3", false, true}}) {
      SCOPED_TRACE(kind.family);
      const TemporaryFolder folder;
      WriteLayoutModel(folder / "model", kind);
      MegatronStrategy megatron(layout.options, ranks);
      Prepare(megatron, folder / "model", LoadOf(kind), SteadyOptimizer());
      SingleStrategy single;
      const auto expected = SayOfRankZero(*ranks, [&] {
        Prepare(single, folder / "model", LoadOf(kind), SteadyOptimizer());
        return Steps(single, 20, kMicroBatches);
      });
      ExpectSameNumbers(Steps(megatron, 20, kMicroBatches), expected);
      const NamedTensors parameters = WholeParameters(megatron);
      if (ranks->rank() == 0) ExpectSameParameters(parameters, WholeParameters(single));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, MegatronCurvesTest, ::testing::ValuesIn(MegatronLayouts()),
                         LayoutName);

}  // namespace
}  // namespace tandem::parallel
