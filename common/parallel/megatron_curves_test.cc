// Twenty steps of the `megatron` strategy in every layout against one process.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>

#include "common/parallel/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

class MegatronCurvesTest : public ::testing::TestWithParam<std::tuple<MegatronLayout, TinyKind>> {};

TEST_P(MegatronCurvesTest, TwentyStepsAreThoseOfOneProcess) {
  const auto& layout = std::get<MegatronLayout>(GetParam());
  const auto& kind = std::get<TinyKind>(GetParam());
  ranks::RunConnected(layout.ranks, [&](const std::shared_ptr<ranks::Communicator>& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", kind);
    MegatronStrategy megatron(layout.options, ranks);
    Prepare(megatron, folder / "model", LoadOf(kind), SteadyOptimizer());
    SingleStrategy single;
    const auto expected = ComputeOnRankZero(*ranks, [&] {
      Prepare(single, folder / "model", LoadOf(kind), SteadyOptimizer());
      return Steps(single, 20, kMicroBatches);
    });
    ExpectSameNumbers(Steps(megatron, 20, kMicroBatches), expected);
    const NamedTensors parameters = WholeParameters(megatron);
    if (ranks->rank() == 0) ExpectSameParameters(parameters, WholeParameters(single));
  });
}

std::string NameOfCase(const testing::TestParamInfo<MegatronCurvesTest::ParamType>& info) {
  return std::string(std::get<MegatronLayout>(info.param).name) + "_" +
         NameOf(std::get<TinyKind>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Layouts, MegatronCurvesTest,
                         testing::Combine(testing::ValuesIn(MegatronLayouts()),
                                          testing::Values(TinyKind{"qwen2", true, false},
                                                          TinyKind{"qwen3", false, true})),
                         NameOfCase);
// `make test-curves`
INSTANTIATE_TEST_SUITE_P(DISABLED_EveryKind, MegatronCurvesTest,
                         testing::Combine(testing::ValuesIn(MegatronLayouts()),
                                          testing::ValuesIn(EveryTinyKind())),
                         NameOfCase);

}  // namespace
}  // namespace tandem::parallel
