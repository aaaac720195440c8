// Adapters train under every layout as in one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/megatron/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/parallel/testing/same_training.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/tiny_kinds.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/whole_parameters.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

using kernels::WeightFormat;

LoadOptions Adapted(const TinyKind& kind, WeightFormat format) {
  LoadOptions load = LoadOf(kind);
  load.lora = {.rank = 3, .alpha = 6, .target_modules = {kAllLinear}, .seed = 5};
  load.placement.weight_format = format;
  return load;
}

// Prepares `strategy`, trains it beside one process and compares the two.
void ExpectTrainsLikeOneProcess(Strategy& strategy, const Ranks& ranks, const std::string& model,
                                const TinyKind& kind, WeightFormat format = WeightFormat::kDense) {
  SCOPED_TRACE(NameOf(kind));
  SingleStrategy single;
  Prepare(strategy, model, Adapted(kind, format), SteadyOptimizer());
  Prepare(single, model, Adapted(kind, format), SteadyOptimizer());
  TensorSums none, of_single;
  const auto digest = ParametersDigest(strategy, none);
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ(*digest, ParametersDigest(single, of_single).value());
  const NamedTensors before = WholeParameters(single);
  ExpectSameNumbers(Steps(strategy, 2, kMicroBatches), Steps(single, 2, kMicroBatches));
  const NamedTensors parameters = WholeParameters(strategy), expected = WholeParameters(single);
  if (ranks->rank() == 0) ExpectSameParameters(parameters, expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Parameter* const parameter = &single.model().DeclaredParameters()[i];
    // Perhaps no token has chosen the expert.
    if (parameter->spec.expert.has_value() && parameter->trainable) continue;
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

TEST_P(ZeroAdaptersTest, TrainBesidePackedWeights) {
  if (GetParam() == 3) GTEST_SKIP() << "refused: packed weights are not gathered";
  for (const TinyKind& kind : {TinyKind{"qwen2", true, false}, TinyKind{"llama", true, true},
                               TinyKind{"qwen3_moe", false, false}}) {
    ranks::RunConnected(2, [&](const Ranks& ranks) {
      const TemporaryFolder folder;
      WriteTinyModel(folder / "model", 3, {{"tie_word_embeddings", kind.tied}}, kind.family);
      ZeroStrategy zero(ZeroOfStage(GetParam()), ranks);
      ExpectTrainsLikeOneProcess(zero, ranks, folder / "model", kind, WeightFormat::kInt8);
    });
  }
}

TEST(Zero3AdaptersTest, PackedWeightsAreRefused) {
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3, {}, "llama");
    ZeroStrategy zero(ZeroOfStage(3), ranks);
    LoadOptions load = Adapted({}, WeightFormat::kInt8);
    load.requires_grad = true;
    EXPECT_EQ(FieldPath(zero.LoadModel(folder / "model", load)), "placement.weight_format");
  });
}

// An export of a model in int8 has the values of the files.
TEST(PackedAdaptersTest, WholeParametersAreThoseOfFilesThatHaveNotChanged) {
  const TemporaryFolder folder;
  WriteTinyModel(folder / "model", 3, {}, "llama");
  SingleStrategy single;
  Prepare(single, folder / "model", Adapted({}, WeightFormat::kInt8), SteadyOptimizer());
  const auto dense = std::move(Model::Load(folder / "model")).value();
  int64_t packed = 0;
  for (const auto& [name, value] : WholeParameters(single)) {
    const at::Tensor in_files = dense->Parameter(name);
    if (!in_files.defined()) continue;  // an adapter
    EXPECT_TRUE(at::equal(value, in_files)) << name;
    packed += single.model().Parameter(name).defined() ? 0 : 1;
  }
  EXPECT_GT(packed, 8);
  WriteTinyModel(folder / "model", 4, {}, "llama");
  const auto status = single.VisitParameters(
      [](const std::string&, const at::Tensor&) { return absl::OkStatus(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  TensorSums none;
  EXPECT_EQ(ParametersDigest(single, none).status().code(), absl::StatusCode::kFailedPrecondition);
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

// A shard of a map that is cut by its input has groups of inputs of its own, whose scales are other
// ones: there the values of int8 depend on the layout, and those of bfloat16 do not.
TEST_P(MegatronAdaptersTest, TrainBesidePackedWeights) {
  const MegatronLayout& layout = GetParam();
  const WeightFormat format =
      layout.options.tensor_model_parallel_size > 1 ? WeightFormat::kBfloat16 : WeightFormat::kInt8;
  const bool experts = layout.options.expert_model_parallel_size > 1;
  ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
    for (const TinyKind& kind :
         experts ? std::vector<TinyKind>{{"qwen3_moe", false, false}, {"mixtral", true, true}}
                 : std::vector<TinyKind>{{"qwen2", true, false},
                                         {"llama", false, true},
                                         {"deepseek_v3", false, false},
                                         {"qwen2_5_vl", true, false}}) {
      const TemporaryFolder folder;
      WriteLayoutModel(folder / "model", kind);
      MegatronStrategy strategy(layout.options, ranks);
      ExpectTrainsLikeOneProcess(strategy, ranks, folder / "model", kind, format);
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
