#include "common/parallel/megatron/megatron_strategy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/megatron_layouts.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

class MegatronStrategyTest : public ::testing::TestWithParam<MegatronLayout> {};

TEST_P(MegatronStrategyTest, EveryModelIsThatOfOneProcess) {
  const MegatronLayout& layout = GetParam();
  ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
    for (const TinyKind& kind : KindsOf(layout)) {
      SCOPED_TRACE(NameOf(kind));
      const TemporaryFolder folder;
      WriteLayoutModel(folder / "model", kind);
      MegatronStrategy megatron(layout.options, ranks);
      SingleStrategy single;
      Prepare(megatron, folder / "model", LoadOf(kind), SteadyOptimizer());
      const auto expected = ComputeOnRankZero(*ranks, [&] {
        Prepare(single, folder / "model", LoadOf(kind), SteadyOptimizer());
        return Outputs(single, kMicroBatches, 99);
      });
      const auto outputs = Outputs(megatron, kMicroBatches, 99);
      ASSERT_EQ(outputs.size(), expected.size());
      for (size_t i = 0; i < outputs.size(); ++i) {
        ASSERT_EQ(outputs[i].size(), expected[i].size());
        for (size_t t = 0; t < outputs[i].size(); ++t) {
          // Values pass through zero.
          EXPECT_NEAR(outputs[i][t], expected[i][t],
                      kTolerance * std::max(1.0, std::abs(expected[i][t])));
        }
      }
      const auto steps = ComputeOnRankZero(*ranks, [&] { return Steps(single, 2, kMicroBatches); });
      ExpectSameNumbers(Steps(megatron, 2, kMicroBatches), steps);
      const NamedTensors parameters = WholeParameters(megatron);
      if (ranks->rank() == 0) ExpectSameParameters(parameters, WholeParameters(single));
    }
  });
}

// An error of one rank is returned on all, and the ranks are still in step after it.
TEST_P(MegatronStrategyTest, AnErrorOfOneRankIsReturnedOnAll) {
  const MegatronLayout& layout = GetParam();
  ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", KindsOf(layout).front());
    MegatronStrategy megatron(layout.options, ranks);
    Prepare(megatron, folder / "model");
    const auto input = [](int64_t) { return MakeRaggedBatch({{1, 2, 3}}); };
    // The error is on one of the ranks that compute the output alone.
    const bool fails = ranks->rank() == ranks->size() - 1;
    const int64_t last = megatron.data_parallel_size() - 1;
    const int64_t count = 2 * last + 3;  // not as many for each replica
    const absl::Status status = megatron.ForwardBackward(
        count, input,
        [&](int64_t i, const RaggedBatch&, const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
          if (fails && i == last) return NotFiniteError("a loss");
          return at::ones_like(hidden);
        });
    EXPECT_TRUE(IsNotFinite(status)) << status;
    EXPECT_EQ(status.message(), "a loss");

    const auto outputs =
        megatron.Forward(count, input,
                         [&](int64_t i, const RaggedBatch&,
                             const at::Tensor&) -> absl::StatusOr<std::vector<double>> {
                           if (fails && i == last) throw std::runtime_error("an output");
                           return std::vector<double>{1};
                         });
    EXPECT_EQ(outputs.status().code(), absl::StatusCode::kInternal);

    const absl::Status no_input = megatron.ForwardBackward(
        count,
        [&](int64_t i) {
          if (fails && i == last) throw std::runtime_error("an input");
          return input(i);
        },
        [](int64_t, const RaggedBatch&, const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
          return at::ones_like(hidden);
        });
    EXPECT_EQ(no_input.code(), absl::StatusCode::kInternal);
    EXPECT_NE(std::string(no_input.message()).find("an input"), std::string::npos) << no_input;
    EXPECT_GT(Step(megatron, kMicroBatches, 0).grad_norm, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, MegatronStrategyTest, ::testing::ValuesIn(MegatronLayouts()),
                         LayoutName);

INSTANTIATE_TEST_SUITE_P(Experts, MegatronStrategyTest, ::testing::ValuesIn(ExpertLayouts()),
                         LayoutName);

INSTANTIATE_TEST_SUITE_P(
    More, MegatronStrategyTest,
    ::testing::Values(MegatronLayout{"Tp2Cp2",
                                     4,
                                     {.tensor_model_parallel_size = 2,
                                      .context_parallel_size = 2,
                                      .use_distributed_optimizer = true}},
                      MegatronLayout{"Pp2Dp2Whole", 4, {.pipeline_model_parallel_size = 2}}),
    LayoutName);

// A rank holds the layers of its stage, its shard of each.
TEST(MegatronStrategyTest, ARankHoldsItsShard) {
  ranks::RunConnected(4, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", {"llama", true, false});
    MegatronStrategy megatron({.tensor_model_parallel_size = 2,
                               .pipeline_model_parallel_size = 2,
                               .use_distributed_optimizer = true},
                              ranks);
    Prepare(megatron, folder / "model");
    const bool is_last = ranks->rank() >= 2;
    EXPECT_EQ(megatron.computes_output(), is_last);
    for (const Parameter& parameter : megatron.model().DeclaredParameters()) {
      const int64_t block = parameter.spec.block;
      // The head is the embedding.
      const bool held = is_last ? block == 0 || block >= 4 : block < 4;
      EXPECT_EQ(parameter.value.defined(), held) << parameter.spec.name;
      if (!held) continue;
      if (parameter.spec.name == kEmbeddingName) {  // 61 rows
        EXPECT_EQ(parameter.value.size(0), ranks->rank() % 2 == 0 ? 31 : 30);
        continue;
      }
      const int64_t cut = parameter.spec.shard_axis.has_value() ? 2 : 1;
      EXPECT_EQ(parameter.value.numel() * cut, parameter.spec.numel()) << parameter.spec.name;
    }
  });
}

// Ranks 0 and 2 hold the same experts, as do 1 and 3; the gradients of these are summed over two
// ranks, those of everything else over four.
TEST(MegatronStrategyTest, ARankHoldsItsExperts) {
  ranks::RunConnected(4, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", {"qwen3_moe", false, false});
    MegatronStrategy megatron({.expert_model_parallel_size = 2, .use_distributed_optimizer = true},
                              ranks);
    Prepare(megatron, folder / "model");
    int64_t held = 0, experts = 0;
    for (const Parameter& parameter : megatron.model().DeclaredParameters()) {
      const std::optional<ExpertOfLayer>& expert = parameter.spec.expert;
      const bool here = !expert || expert->index / 4 == ranks->rank() % 2;
      EXPECT_EQ(parameter.value.defined(), here) << parameter.spec.name;
      if (!here) continue;
      EXPECT_EQ(parameter.value.numel(), parameter.spec.numel());
      held += parameter.spec.numel();
      if (expert) experts += parameter.spec.numel();
    }
    EXPECT_GT(experts, 0);
    EXPECT_LT(experts, held);
  });
}

// Two ranks train for three steps as one process does; parameters change if and only if they train.
void ExpectFrozenKeepTheirBits(const MegatronOptions& options, const TinyKind& kind,
                               const LoadOptions& load) {
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", kind);
    MegatronStrategy megatron(options, ranks);
    SingleStrategy single, before;
    Prepare(megatron, folder / "model", load, SteadyOptimizer());
    Prepare(single, folder / "model", load, SteadyOptimizer());
    Prepare(before, folder / "model");
    ExpectSameNumbers(Steps(megatron, 3, kMicroBatches), Steps(single, 3, kMicroBatches));
    const NamedTensors now = WholeParameters(megatron), start = WholeParameters(before);
    for (size_t i = 0; i < now.size(); ++i) {
      const bool trained = megatron.model().DeclaredParameters()[i].trainable;
      EXPECT_EQ(now[i].second.equal(start[i].second), !trained) << now[i].first;
    }
  });
}

// Only experts train, of which a rank may get no row: its part of the backward pass is awaited.
TEST(MegatronStrategyTest, FrozenParametersAroundExpertsKeepTheirBits) {
  for (const std::vector<std::string>& freeze :
       {std::vector<std::string>{"model.embed*", "*norm*", "*self_attn*", "*mlp.gate.weight",
                                 "model.layers.1.*", "lm_head*"},
        std::vector<std::string>{"*mlp.experts.[0-3].*"}, std::vector<std::string>{"*experts.*"}}) {
    ExpectFrozenKeepTheirBits({.expert_model_parallel_size = 2, .use_distributed_optimizer = true},
                              {"qwen3_moe", false, false}, {.freeze = freeze});
  }
}

TEST(MegatronStrategyTest, ALayoutThatDoesNotFitIsRefusedOnAllRanks) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model");
    MegatronStrategy megatron(
        {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 3}, ranks);
    const absl::Status status = megatron.LoadModel(folder / "model", {.requires_grad = true});
    EXPECT_EQ(FieldPath(status), "strategy.virtual_pipeline_model_parallel_size") << status;
  });
}

TEST(MegatronStrategyTest, FrozenParametersKeepTheirBits) {
  // The first stage has nothing to train: no gradient travels back to it.
  const LoadOptions load = {.freeze = {"model.embed*", "model.layers.[012].*", "*norm*"}};
  for (const MegatronOptions& options :
       {MegatronOptions{.tensor_model_parallel_size = 2, .use_distributed_optimizer = true},
        MegatronOptions{.pipeline_model_parallel_size = 2, .use_distributed_optimizer = true}}) {
    ExpectFrozenKeepTheirBits(options, {}, load);
  }
}

TEST(MegatronStrategyTest, ParametersAreReplacedByWholeOnes) {
  ranks::RunConnected(4, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteLayoutModel(folder / "model", {"qwen2", true, false});
    MegatronStrategy megatron({.tensor_model_parallel_size = 2,
                               .pipeline_model_parallel_size = 2,
                               .use_distributed_optimizer = true},
                              ranks);
    SingleStrategy single;
    Prepare(megatron, folder / "model");
    Prepare(single, folder / "model");
    Steps(single, 2, kMicroBatches);
    NamedTensors whole = WholeParameters(single);
    ASSERT_TRUE(megatron.LoadParameters(whole).ok());
    const NamedTensors now = WholeParameters(megatron);
    for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(now[i].second.equal(whole[i].second));
    whole.back().second = whole.back().second.narrow(0, 0, 1).clone();
    EXPECT_EQ(megatron.LoadParameters(whole).code(), absl::StatusCode::kInvalidArgument);
    // An error of the visitor, which runs on rank 0, is returned on all ranks.
    EXPECT_EQ(megatron
                  .VisitParameters([](const std::string&, const at::Tensor&) {
                    return absl::DataLossError("a disk");
                  })
                  .code(),
              absl::StatusCode::kDataLoss);
  });
}

}  // namespace
}  // namespace tandem::parallel
