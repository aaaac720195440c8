// Twenty steps of the `megatron` strategy in every layout against one process.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>

#include "common/parallel/megatron/megatron_strategy.h"
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

INSTANTIATE_TEST_SUITE_P(Experts, MegatronCurvesTest,
                         testing::Combine(testing::ValuesIn(ExpertLayouts()),
                                          testing::Values(TinyKind{"qwen3_moe", false, true},
                                                          TinyKind{"deepseek_v3", false, false})),
                         NameOfCase);

class MegatronRoundedWeightsTest : public ::testing::TestWithParam<MegatronLayout> {};

// Weights rounded to bfloat16 in float32 (Placement::weight_dtype). An update that differs in its
// last bits can round to another bfloat16 weight: a relative difference of 2^-8 in one weight of a
// layer, far less in the loss.
TEST_P(MegatronRoundedWeightsTest, TheFirstStepsAreThoseOfOneProcess) {
  constexpr double kRoundedTolerance = 1e-3;  // relative
  const MegatronLayout& layout = GetParam();
  ranks::RunConnected(layout.ranks, [&](const std::shared_ptr<ranks::Communicator>& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", {.tied = true});
    const LoadOptions load = {.placement = {.weight_dtype = at::kBFloat16}};
    MegatronStrategy megatron(layout.options, ranks);
    Prepare(megatron, folder / "model", load, SteadyOptimizer());
    const auto expected = ComputeOnRankZero(*ranks, [&] {
      SingleStrategy single;
      Prepare(single, folder / "model", load, SteadyOptimizer());
      return Steps(single, 5, kMicroBatches);
    });
    const std::vector<StepNumbers> numbers = Steps(megatron, 5, kMicroBatches);
    ExpectClose(numbers[0].loss, expected[0].loss);
    ExpectClose(numbers[0].grad_norm, expected[0].grad_norm);
    for (size_t i = 1; i < numbers.size(); ++i) {
      EXPECT_NEAR(numbers[i].loss, expected[i].loss, kRoundedTolerance * expected[i].loss) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, MegatronRoundedWeightsTest, testing::ValuesIn(MegatronLayouts()),
                         LayoutName);

// `make test-curves`
INSTANTIATE_TEST_SUITE_P(DISABLED_EveryKind, MegatronCurvesTest,
                         testing::Combine(testing::ValuesIn(MegatronLayouts()),
                                          testing::ValuesIn(EveryTinyKind())),
                         NameOfCase);
INSTANTIATE_TEST_SUITE_P(DISABLED_EveryExpertKind, MegatronCurvesTest,
                         testing::Combine(testing::ValuesIn(ExpertLayouts()),
                                          testing::ValuesIn(ExpertKinds())),
                         NameOfCase);

}  // namespace
}  // namespace tandem::parallel
