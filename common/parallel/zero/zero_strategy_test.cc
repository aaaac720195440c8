#include "common/parallel/zero/zero_strategy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/errors/not_finite.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/testing/same_training.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/tiny_kinds.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/tensor_memory.h"

namespace tandem::parallel {
namespace {

using Ranks = std::shared_ptr<ranks::Communicator>;

// A rate at which twenty steps learn without the noise of rounded weights.
OptimizerOptions SteadySteps() {
  OptimizerOptions options = FastOptimizer();
  options.learning_rate = 1e-3;
  return options;
}

// Ranks, stage, model.
class ZeroStrategyTest : public ::testing::TestWithParam<std::tuple<int, int, TinyKind>> {};

// Five micro-batches: the ranks have different numbers of them.
TEST_P(ZeroStrategyTest, TwentyStepsAreThoseOfOneProcess) {
  const int stage = std::get<1>(GetParam());
  const TinyKind& kind = std::get<TinyKind>(GetParam());
  ranks::RunConnected(std::get<0>(GetParam()), [&](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3, {{"tie_word_embeddings", kind.tied}}, kind.family);
    ZeroStrategy zero(ZeroOfStage(stage), ranks);
    SingleStrategy single;
    Prepare(zero, folder / "model", LoadOf(kind), FastOptimizer());
    Prepare(single, folder / "model", LoadOf(kind), FastOptimizer());
    EXPECT_EQ(zero.model().weights_digest(), single.model().weights_digest());
    ExpectSameNumbers(Steps(zero, 20), Steps(single, 20));
    const NamedTensors parameters = WholeParameters(zero);
    if (ranks->rank() == 0) ExpectSameParameters(parameters, WholeParameters(single));

    const auto a = Outputs(zero, 5, 99), b = Outputs(single, 5, 99);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].size(), b[i].size());
      for (size_t t = 0; t < a[i].size(); ++t) EXPECT_NEAR(a[i][t], b[i][t], 2e-3);
    }
  });
}

std::string NameOfCase(const testing::TestParamInfo<ZeroStrategyTest::ParamType>& info) {
  return "ranks" + std::to_string(std::get<0>(info.param)) + "_stage" +
         std::to_string(std::get<1>(info.param)) + "_" + NameOf(std::get<TinyKind>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Layouts, ZeroStrategyTest,
                         testing::Values(std::tuple{1, 1, TinyKind{"llama", false, false}},
                                         std::tuple{2, 1, TinyKind{"llama", true, false}},
                                         std::tuple{2, 2, TinyKind{"qwen2", false, false}},
                                         std::tuple{2, 3, TinyKind{"qwen3", false, false}},
                                         std::tuple{2, 3, TinyKind{"llama", true, false}},
                                         std::tuple{4, 1, TinyKind{"qwen2", true, false}},
                                         std::tuple{4, 2, TinyKind{"llama", true, false}},
                                         std::tuple{4, 3, TinyKind{"qwen2", true, false}},
                                         std::tuple{3, 3, TinyKind{"llama", false, false}},
                                         std::tuple{2, 1, TinyKind{"qwen3", true, true}},
                                         std::tuple{2, 3, TinyKind{"qwen2_5_vl", true, false}},
                                         std::tuple{2, 3, TinyKind{"deepseek_v3", true, false}},
                                         std::tuple{2, 2, TinyKind{"qwen3_moe", false, false}},
                                         std::tuple{2, 3, TinyKind{"mixtral", false, true}},
                                         std::tuple{2, 2, TinyKind{"llama", true, true}},
                                         std::tuple{4, 3, TinyKind{"qwen2", true, true}}),
                         NameOfCase);
// `make test-curves`
INSTANTIATE_TEST_SUITE_P(DISABLED_EveryKind, ZeroStrategyTest,
                         testing::Combine(testing::Values(2, 4), testing::Values(1, 2, 3),
                                          testing::ValuesIn(EveryTinyKind())),
                         NameOfCase);

// Between passes a rank in stage 3 has its shard of the parameters alone.
TEST(ZeroStrategyTest, AStageKeepsItsShardsAlone) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    for (const int stage : {1, 2, 3}) {
      ZeroStrategy zero(ZeroOfStage(stage), ranks);
      Prepare(zero, folder / "model");
      Step(zero, 3, 0);
      for (const at::Tensor& block : zero.model().BlockBuffers()) {
        EXPECT_EQ(HasMemory(block), stage < 3);
      }
      for (const Parameter& parameter : zero.model().DeclaredParameters()) {
        EXPECT_EQ(HasMemory(parameter.value.grad()), stage < 2);
      }
    }
  });
}

// The bytes that a rank sends: for all parameters, of P bytes, a reduce-scatter or an all-gather is
// (n - 1) / n P (section 7 of the paper).
TEST(ZeroStrategyTest, SendsWhatThePaperSays) {
  constexpr int kRanks = 2;
  ranks::RunConnected(kRanks, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    for (const int stage : {1, 2, 3}) {
      ZeroStrategy zero(ZeroOfStage(stage), ranks);
      Prepare(zero, folder / "model");
      const std::vector<at::Tensor>& blocks = zero.model().BlockBuffers();
      int64_t all = 0;
      for (const at::Tensor& block : blocks) all += static_cast<int64_t>(block.nbytes());
      const auto ends = static_cast<int64_t>(blocks.front().nbytes() + blocks.back().nbytes());
      ranks->ResetVolume();
      constexpr int64_t kRounds = 3;  // of five micro-batches
      Step(zero, 5, 0);
      const ranks::CommunicationVolume volume = ranks->volume();
      const auto sent = [&](int64_t whole) { return whole * (kRanks - 1) / kRanks; };
      EXPECT_EQ(volume.reduce_scatter.bytes, sent(all) * (stage == 1 ? 1 : kRounds));
      // Stage 3 gathers forward and backward, but for the embedding, which its backward pass does
      // not read, and the last block, which is still there.
      EXPECT_EQ(volume.all_gather.bytes, stage == 3 ? kRounds * sent(2 * all - ends) : sent(all));
    }
  });
}

TEST(ZeroStrategyTest, OverlapOffloadAndBucketsChangeNoBit) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    for (const int stage : {1, 2, 3}) {
      ZeroOptions without_overlap = ZeroOfStage(stage), offloaded = without_overlap,
                  small_buckets = without_overlap;
      without_overlap.overlap_comm = false;
      offloaded.offload_optimizer = true;
      small_buckets.reduce_bucket_size = 1000;
      small_buckets.allgather_bucket_size = 700;
      ZeroStrategy plain(without_overlap, ranks), other(offloaded, ranks);
      for (ZeroStrategy* strategy : {&plain, &other}) {
        Prepare(*strategy, folder / "model", {}, FastOptimizer());
        ranks->ResetVolume();
        Steps(*strategy, 3);
      }
      const ranks::CommunicationVolume plain_volume = ranks->volume();  // the same of both
      ZeroStrategy in_buckets(small_buckets, ranks);
      Prepare(in_buckets, folder / "model", {}, FastOptimizer());
      ranks->ResetVolume();
      Steps(in_buckets, 3);
      const ranks::CommunicationVolume volume = ranks->volume();
      EXPECT_EQ(volume.reduce_scatter.bytes, plain_volume.reduce_scatter.bytes);
      EXPECT_EQ(volume.all_gather.bytes, plain_volume.all_gather.bytes);
      EXPECT_GT(volume.reduce_scatter.calls, plain_volume.reduce_scatter.calls);
      EXPECT_GT(volume.all_gather.calls, plain_volume.all_gather.calls);
      const NamedTensors a = WholeParameters(plain), b = WholeParameters(other);
      const NamedTensors c = WholeParameters(in_buckets);
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(a[i].second.equal(b[i].second));
        EXPECT_TRUE(a[i].second.equal(c[i].second));
      }
    }
  });
}

// Stage 3 in bfloat16: float32 shards, of which bfloat16 copies are gathered for a pass.
LoadOptions InBfloat16(std::vector<std::string> freeze = {}) {
  return {.freeze = std::move(freeze), .placement = {.dtype = at::kBFloat16}};
}

// Every micro-batch runs on one rank with the weights that `single` uses, so only the order in
// which gradients are added differs. An update that differs in its last bits can round to another
// bfloat16 weight: a relative difference of 2^-8 in one weight of a layer, far less in the loss.
// Norms are frozen, because `single` reads them in float32 and stage 3 in bfloat16.
TEST(ZeroStrategyTest, TwentyStepsInBfloat16AreThoseOfOneProcess) {
  constexpr double kTolerance = 2e-3;  // relative
  for (const bool tied : {false, true}) {
    ranks::RunConnected(2, [&](const Ranks& ranks) {
      const TemporaryFolder folder;
      WriteTinyModel(folder / "model", 3, {{"tie_word_embeddings", tied}});
      ZeroStrategy zero(ZeroOfStage(3), ranks);
      SingleStrategy single;
      Prepare(zero, folder / "model", InBfloat16({"*norm*"}), FastOptimizer());
      Prepare(single, folder / "model", InBfloat16({"*norm*"}), FastOptimizer());
      const std::vector<StepNumbers> a = Steps(zero, 20), b = Steps(single, 20);
      ExpectClose(a[0].loss, b[0].loss);
      ExpectClose(a[0].grad_norm, b[0].grad_norm);
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i].loss, b[i].loss, kTolerance * b[i].loss) << "step " << i;
      }
    });
  }
}

// The same with norms that train, which stage 3 rounds to bfloat16, and as a critic.
TEST(ZeroStrategyTest, InBfloat16NormsAreRoundedToo) {
  constexpr double kTolerance = 1e-2;  // relative
  for (const bool critic : {false, true}) {
    ranks::RunConnected(2, [&](const Ranks& ranks) {
      const TemporaryFolder folder;
      WriteTinyModel(folder / "model", 3, {}, "qwen3");
      LoadOptions load = LoadOf({.family = "qwen3", .critic = critic});
      load.placement.dtype = at::kBFloat16;
      ZeroStrategy zero(ZeroOfStage(3), ranks);
      SingleStrategy single;
      Prepare(zero, folder / "model", load, SteadySteps());
      Prepare(single, folder / "model", load, SteadySteps());
      const std::vector<StepNumbers> a = Steps(zero, 20), b = Steps(single, 20);
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i].loss, b[i].loss, kTolerance * b[i].loss) << "step " << i;
      }
    });
  }
}

TEST(ZeroStrategyTest, InBfloat16GathersHalfTheBytesAndKeepsNoBlock) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    const auto volume_of_a_step = [&](const LoadOptions& load) {
      ZeroStrategy zero(ZeroOfStage(3), ranks);
      Prepare(zero, folder / "model", load);
      ranks->ResetVolume();
      Step(zero, 5, 0);
      for (const std::vector<at::Tensor>* buffers :
           {&zero.model().BlockBuffers(), &zero.model().ComputeBuffers()}) {
        for (const at::Tensor& buffer : *buffers) EXPECT_FALSE(HasMemory(buffer));
      }
      return ranks->volume();
    };
    const ranks::CommunicationVolume wide = volume_of_a_step({}),
                                     half = volume_of_a_step(InBfloat16());
    EXPECT_GT(half.all_gather.bytes, 0);
    EXPECT_EQ(2 * half.all_gather.bytes, wide.all_gather.bytes);
    EXPECT_EQ(half.reduce_scatter.bytes, wide.reduce_scatter.bytes);  // float32 gradients
  });
}

TEST(ZeroStrategyTest, InBfloat16OverlapOffloadAndBucketsChangeNoBit) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    const auto trained = [&](const ZeroOptions& options) {
      ZeroStrategy zero(options, ranks);
      Prepare(zero, folder / "model", InBfloat16(), FastOptimizer());
      Steps(zero, 3);
      return WholeParameters(zero);
    };
    ZeroOptions without_overlap = ZeroOfStage(3), offloaded = without_overlap,
                small_buckets = without_overlap;
    without_overlap.overlap_comm = false;
    offloaded.offload_optimizer = true;
    small_buckets.reduce_bucket_size = 1000;
    small_buckets.allgather_bucket_size = 700;
    const NamedTensors a = trained(without_overlap);
    const NamedTensors b = trained(offloaded);
    const NamedTensors c = trained(small_buckets);
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].second.scalar_type(), at::kFloat);
      EXPECT_TRUE(a[i].second.equal(b[i].second));
      EXPECT_TRUE(a[i].second.equal(c[i].second));
    }
  });
}

// Masters and moments are float32 in every layout and load to the bit. The next step is that of
// `single`.
TEST(ZeroStrategyTest, ACheckpointInBfloat16LoadsUnderAnotherLayout) {
  const TemporaryFolder folder;
  const auto make = [](int stage, const Ranks& ranks) -> std::unique_ptr<Strategy> {
    if (stage == 0) return std::make_unique<SingleStrategy>();
    return std::make_unique<ZeroStrategy>(ZeroOfStage(stage), ranks);
  };
  for (const auto& [from, to] : {std::pair{3, 0}, std::pair{0, 3}, std::pair{3, 1}}) {
    const std::string directory = folder / (std::to_string(from) + "to" + std::to_string(to));
    std::filesystem::create_directories(directory);
    const auto ranks_of = [](int stage) { return stage == 0 ? 1 : 2; };
    ranks::RunConnected(ranks_of(from), [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3);
      const auto strategy = make(from, ranks);
      Prepare(*strategy, own / "model", InBfloat16(), FastOptimizer());
      Steps(*strategy, 2);
      ASSERT_TRUE(strategy->SaveOptimizer(directory).ok());
      const NamedTensors whole = WholeParameters(*strategy);
      if (ranks->rank() == 0) {
        const auto model = Model::Load(own / "model").value();
        ASSERT_TRUE(model->LoadParameters(whole).ok());
        ASSERT_TRUE(model->Save(directory).ok());
      }
    });
    ranks::RunConnected(ranks_of(to), [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 4);  // other weights, which those of the checkpoint replace
      const auto loaded = make(to, ranks);
      Prepare(*loaded, own / "model", InBfloat16(), FastOptimizer());
      const auto saved = Model::Load(directory).value();
      ASSERT_TRUE(loaded->LoadParameters(saved->Parameters()).ok());
      const absl::Status status = loaded->LoadOptimizer(directory);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(loaded->optimizer_steps(), 2);
      for (const auto& [name, values] : WholeParameters(*loaded)) {
        EXPECT_TRUE(values.equal(saved->Parameter(name))) << name;
      }
      SingleStrategy single;
      Prepare(single, directory, InBfloat16(), FastOptimizer());
      ASSERT_TRUE(single.LoadOptimizer(directory).ok());
      const StepNumbers a = Step(*loaded, 5, 2), b = Step(single, 5, 2);
      EXPECT_NEAR(a.loss, b.loss, 2e-3 * b.loss);
      EXPECT_NEAR(a.grad_norm, b.grad_norm, 2e-2 * b.grad_norm);
    });
  }
}

// Weights rounded to bfloat16 in float32 (Placement::weight_dtype). An update that differs in its
// last bits can round to another bfloat16 weight, as above.
TEST(ZeroStrategyTest, RoundedWeightsAreThoseOfOneProcess) {
  constexpr double kTolerance = 2e-3;  // relative
  for (const int stage : {1, 2, 3}) {
    for (const bool tied : {false, true}) {
      ranks::RunConnected(2, [&](const Ranks& ranks) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << " tied " << tied);
        const TemporaryFolder folder;
        WriteTinyModel(folder / "model", 3, {{"tie_word_embeddings", tied}});
        const LoadOptions load = {.placement = {.weight_dtype = at::kBFloat16}};
        ZeroOptions options = ZeroOfStage(stage);
        options.overlap_comm = tied;
        ZeroStrategy zero(options, ranks);
        SingleStrategy single, unrounded;
        Prepare(zero, folder / "model", load);
        Prepare(single, folder / "model", load);
        Prepare(unrounded, folder / "model");
        EXPECT_EQ(Outputs(zero, 5, 99), Outputs(single, 5, 99));
        EXPECT_NE(Outputs(single, 5, 99), Outputs(unrounded, 5, 99));
        const NamedTensors start = WholeParameters(zero);
        if (ranks->rank() == 0) {
          const NamedTensors loaded = WholeParameters(unrounded);
          for (size_t i = 0; i < start.size(); ++i) {
            EXPECT_TRUE(at::equal(start[i].second, loaded[i].second)) << start[i].first;
          }
        }
        const std::vector<StepNumbers> a = Steps(zero, 20), b = Steps(single, 20);
        ExpectClose(a[0].loss, b[0].loss);
        ExpectClose(a[0].grad_norm, b[0].grad_norm);
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_NEAR(a[i].loss, b[i].loss, kTolerance * b[i].loss) << "step " << i;
        }
      });
    }
  }
}

// An error of one rank is returned on all, and the ranks are still in step after it.
TEST(ZeroStrategyTest, AnErrorOfOneRankIsReturnedOnAll) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    for (const int stage : {1, 3}) {
      ZeroStrategy zero(ZeroOfStage(stage), ranks);
      Prepare(zero, folder / "model");
      const auto input = [](int64_t) { return MakeRaggedBatch({{1, 2, 3}}); };
      const absl::Status status =
          zero.ForwardBackward(4, input,
                               [](int64_t i, const RaggedBatch&,
                                  const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
                                 if (i == 1) return NotFiniteError("the loss of micro-batch 1");
                                 return at::ones_like(hidden);
                               });
      EXPECT_TRUE(IsNotFinite(status)) << status;
      EXPECT_EQ(status.message(), "the loss of micro-batch 1");
      const auto outputs =
          zero.Forward(3, input,
                       [](int64_t i, const RaggedBatch&,
                          const at::Tensor&) -> absl::StatusOr<std::vector<double>> {
                         if (i == 2) throw std::runtime_error("micro-batch 2");
                         return std::vector<double>{1};
                       });
      EXPECT_EQ(outputs.status().code(), absl::StatusCode::kInternal);
      const absl::Status unread = zero.ForwardBackward(
          2,
          [&](int64_t i) {
            if (i == 1) throw std::runtime_error("input 1");
            return input(i);
          },
          [](int64_t, const RaggedBatch&, const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
            return at::ones_like(hidden);
          });
      EXPECT_EQ(unread.message(), "input: input 1");
      EXPECT_GT(Step(zero, 3, 0).grad_norm, 0);
    }
  });
}

TEST(ZeroStrategyTest, FrozenParametersKeepTheirBits) {
  ranks::RunConnected(2, [](const Ranks& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3);
    const LoadOptions load = {.freeze = {"*norm*", "model.embed*", "*.0.self_attn.q_proj*"}};
    for (const int stage : {1, 2, 3}) {
      ZeroStrategy zero(ZeroOfStage(stage), ranks);
      SingleStrategy single, before;
      Prepare(zero, folder / "model", load, FastOptimizer());
      Prepare(single, folder / "model", load, FastOptimizer());
      Prepare(before, folder / "model");
      ExpectSameNumbers(Steps(zero, 3), Steps(single, 3));
      for (const auto& [name, now] : WholeParameters(zero)) {
        const bool trains = zero.model().Parameter(name).requires_grad();
        EXPECT_EQ(now.equal(before.model().Parameter(name)), !trains) << name;
      }
    }
  });
}

// Training continues from a checkpoint of any layout under any other.
TEST(ZeroStrategyTest, ACheckpointOfAnyLayoutLoadsUnderAnyOther) {
  const TemporaryFolder folder;
  struct Layout {
    int ranks, stage;  // stage 0: single
  };
  const Layout layouts[] = {{1, 0}, {2, 1}, {2, 3}, {3, 2}};
  const auto make = [](const Layout& layout, const Ranks& ranks) {
    return layout.stage == 0 ? std::unique_ptr<Strategy>(std::make_unique<SingleStrategy>())
                             : std::make_unique<ZeroStrategy>(ZeroOfStage(layout.stage), ranks);
  };
  for (size_t saved = 0; saved < std::size(layouts); ++saved) {
    const std::string directory = folder / std::to_string(saved);
    std::filesystem::create_directories(directory);
    ranks::RunConnected(layouts[saved].ranks, [&](const Ranks& ranks) {
      const TemporaryFolder own;
      WriteTinyModel(own / "model", 3);
      const auto strategy = make(layouts[saved], ranks);
      Prepare(*strategy, own / "model", {}, FastOptimizer());
      Steps(*strategy, 2);
      EXPECT_TRUE(strategy->SaveOptimizer(directory).ok());
      const NamedTensors whole = WholeParameters(*strategy);
      if (ranks->rank() == 0) {
        const auto model = Model::Load(own / "model").value();
        ASSERT_TRUE(model->LoadParameters(whole).ok());
        EXPECT_TRUE(model->Save(directory).ok());
      }
    });
    for (const Layout& layout : layouts) {
      ranks::RunConnected(layout.ranks, [&](const Ranks& ranks) {
        const TemporaryFolder own;
        WriteTinyModel(own / "model", 3);
        const auto loaded = make(layout, ranks);
        Prepare(*loaded, directory, {}, FastOptimizer());
        const absl::Status status = loaded->LoadOptimizer(directory);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(loaded->optimizer_steps(), 2);

        SingleStrategy single;
        Prepare(single, own / "model", {}, FastOptimizer());
        Steps(single, 2);
        for (uint64_t seed = 2; seed < 5; ++seed) {
          const StepNumbers a = Step(*loaded, 5, seed), b = Step(single, 5, seed);
          ExpectSameNumbers({a}, {b});
        }
      });
    }
  }
}

TEST(ZeroStrategyTest, AShardedStateThatLacksAShardIsRefused) {
  const TemporaryFolder folder;
  ranks::RunConnected(2, [&](const Ranks& ranks) {
    const TemporaryFolder own;
    WriteTinyModel(own / "model", 3);
    ZeroStrategy zero(ZeroOfStage(2), ranks);
    Prepare(zero, own / "model");
    Step(zero, 2, 0);
    ASSERT_TRUE(zero.SaveOptimizer(folder.path()).ok());
    if (ranks->rank() == 1) {
      std::filesystem::remove(folder / "optimizer-00001-of-00002.safetensors");
    }
    ranks->Barrier();
    EXPECT_EQ(zero.LoadOptimizer(folder.path()).code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(zero.optimizer_steps(), 1);
  });
}

}  // namespace
}  // namespace tandem::parallel
