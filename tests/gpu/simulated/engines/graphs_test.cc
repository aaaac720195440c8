// Passes of decoding as captured graphs.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/coauthoring/tandem_config.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/model/testing/models.h"
#include "services/rollout/engine/models/decode_graphs.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/kernels.h"

namespace tandem::rollout {
namespace {

using simulated_gpu::TheCounts;

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kMaxTokens = 200, kBlocksOfSequence = 4;

DType CacheTypeOf(at::ScalarType type) {
  return type == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
}

// Families whose attention is the kernel's.
std::vector<std::string> FamiliesWithGraphs() {
  std::vector<std::string> families;
  for (const std::string& family : EveryFamily()) {
    if (!TinyConfig(family).decoder.latent.has_value()) families.push_back(family);
  }
  return families;
}

enum class Passes {
  kUnpadded,  // as with enforce_eager
  kEager,     // padded, each as if it were the first of its shape
  kGraphs,
};

// The part of a sequence in a pass: it consumes tokens, and wants a row of some of them.
struct Step {
  int sequence;
  int64_t tokens = 1, rows = 1;
};

// A runner, and sequences that it writes. Blocks of a sequence lie apart.
class Runner {
 public:
  Runner(const std::string& family, at::ScalarType type, Passes passes, int count)
      : passes_(passes),
        count_(count),
        starts_(count, 0),
        runner_(TinyModel(family, {}, {.placement = {.device = kGpu, .dtype = type}}),
                kBlocksOfSequence * count, CacheTypeOf(type), /*speculator=*/nullptr,
                TorchRunner::Adapters::kOn, TorchRunner::NewStream(kGpu),
                passes == Passes::kUnpadded ? std::nullopt : std::optional(kMaxTokens)) {}

  TorchRunner& runner() { return runner_; }

  // Forgets a sequence: another one has its place.
  void Restart(int sequence) { starts_[static_cast<size_t>(sequence)] = 0; }

  std::vector<SampledToken> Run(const std::vector<Step>& steps) {
    std::vector<std::vector<int32_t>> blocks, tokens;
    std::vector<std::vector<int64_t>> wanted;
    std::vector<int64_t> starts;
    std::vector<OutputRow> rows;
    for (const Step& step : steps) {
      blocks.emplace_back();
      for (int64_t b = 0; b < kBlocksOfSequence; ++b) {
        blocks.back().push_back(static_cast<int32_t>(b * count_ + step.sequence));
      }
      int64_t& start = starts_[static_cast<size_t>(step.sequence)];
      tokens.emplace_back();
      for (int64_t i = 0; i < step.tokens; ++i) {
        tokens.back().push_back(static_cast<int32_t>((start + i) * (7 + step.sequence) % 50));
      }
      wanted.emplace_back();
      for (int64_t i = step.tokens - step.rows; i < step.tokens; ++i) {
        wanted.back().push_back(i);
        const size_t kind = static_cast<size_t>(number_of_row_ % 5);
        rows.push_back({.token = kind == 4 ? 11 : OutputRow::kDraw,
                        .u = static_cast<double>(number_of_row_++ * 7919 % 1009) / 1009,
                        .sampling = &sampling_[uses_cuts_ ? kind % 4 : kind % 2]});
      }
      starts.push_back(start);
      start += step.tokens;
    }
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < steps.size(); ++i) {
      inputs.push_back(
          {.blocks = blocks[i], .start = starts[i], .tokens = tokens[i], .output_rows = wanted[i]});
    }
    if (passes_ == Passes::kEager) runner_.OnNewWeights();
    PassResults results;
    const absl::Status status =
        runner_.Run({.copies = {}, .sequences = inputs, .rows = rows}, results);
    EXPECT_TRUE(status.ok()) << status;
    std::vector<SampledToken> sampled;
    for (const auto& result : results) {
      EXPECT_TRUE(result.ok()) << result.status();
      sampled.push_back(result.ok() ? *result : SampledToken());
    }
    return sampled;
  }

  // Whether some of the following rows cut.
  void UseCuts(bool uses) { uses_cuts_ = uses; }

 private:
  const Passes passes_;
  const int64_t count_;
  const std::array<SamplingParams, 4> sampling_ = {SamplingParams{.temperature = 0.8},
                                                   {.temperature = 0},
                                                   {.temperature = 1.2, .top_p = 0.7},
                                                   {.top_k = 5, .min_p = 0.01}};
  std::vector<int64_t> starts_;
  int64_t number_of_row_ = 0;
  bool uses_cuts_ = true;
  TorchRunner runner_;
};

void ExpectSameBits(const std::vector<SampledToken>& actual,
                    const std::vector<SampledToken>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].token, expected[i].token) << "row " << i;
    EXPECT_EQ(std::memcmp(&actual[i].logprob, &expected[i].logprob, sizeof(float)), 0)
        << "row " << i << ": " << actual[i].logprob << ", " << expected[i].logprob;
    EXPECT_EQ(std::memcmp(&actual[i].log_keep_mass, &expected[i].log_keep_mass, sizeof(float)), 0)
        << "row " << i;
  }
}

// Prompts, and passes in which sequences join, leave, and cross the borders of blocks (64) and of
// splits (128 keys); with 3, 4 and 5 sequences, and several rows of a sequence, of which not all
// are wanted. Calls after(number) behind each pass.
template <typename Function>
void RunPasses(Runner& runner, const Function& after) {
  int number = 0;
  const auto run = [&](const std::vector<Step>& steps) { after(number++, runner.Run(steps)); };
  run({{0, 60}, {1, 126}, {2, 1}});  // a prompt of more rows than a pass of decoding has
  for (int i = 0; i < 4; ++i) run({{0}, {1}, {2}});
  run({{3, 127}});
  for (int i = 0; i < 2; ++i) run({{0}, {3}, {1}, {2}});
  runner.Restart(1);
  run({{1, 20}});
  for (int i = 0; i < 3; ++i) run({{3}, {0, 3, 1}, {1, 2, 2}});
  runner.UseCuts(false);
  for (int i = 0; i < 3; ++i) run({{1}, {0}, {2}, {3}});
}

class GpuGraphsOfFamilyTest : public testing::TestWithParam<std::string> {};

TEST_P(GpuGraphsOfFamilyTest, PassesHaveTheBitsOfEagerOnes) {
  const simulated_gpu::WithKernels kernels;
  const std::string& family = GetParam();
  // Emulated kernels take their time: float32 for families that differ in attention and experts.
  const bool has_float = family == "llama" || family == "gemma2" || family == "mixtral";
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    if (type == at::kFloat && !has_float) continue;
    std::map<Passes, std::vector<std::vector<SampledToken>>> results;
    for (const Passes passes : {Passes::kUnpadded, Passes::kEager, Passes::kGraphs}) {
      if (passes == Passes::kUnpadded && type != at::kFloat) continue;  // rounding decides
      const int64_t before = TheCounts().replays;
      Runner runner(family, type, passes, /*count=*/4);
      RunPasses(runner, [&](int, std::vector<SampledToken> sampled) {
        results[passes].push_back(std::move(sampled));
      });
      const int64_t replays = TheCounts().replays - before;
      EXPECT_EQ(replays > 6, passes == Passes::kGraphs) << replays;
    }
    for (size_t i = 0; i < results[Passes::kGraphs].size(); ++i) {
      SCOPED_TRACE(testing::Message() << type << ", pass " << i);
      ExpectSameBits(results[Passes::kGraphs][i], results[Passes::kEager][i]);
      if (type != at::kFloat) continue;
      for (size_t row = 0; row < results[Passes::kGraphs][i].size(); ++row) {
        const SampledToken& token = results[Passes::kGraphs][i][row];
        EXPECT_EQ(token.token, results[Passes::kUnpadded][i][row].token);
        EXPECT_NEAR(token.logprob, results[Passes::kUnpadded][i][row].logprob, 1e-4);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GpuGraphsOfFamilyTest, testing::ValuesIn(FamiliesWithGraphs()),
                         [](const auto& info) { return info.param; });

// A copy to the GPU, a replay and a copy to the host, whatever the number of sequences.
TEST(GpuGraphsTest, TheHostDoesTheSameForAnyPassOfAKnownShape) {
  const simulated_gpu::WithKernels kernels;
  for (const int count : {1, 200}) {
    Runner runner("qwen2", at::kBFloat16, Passes::kGraphs, count);
    runner.UseCuts(false);
    std::vector<Step> steps;
    for (int i = 0; i < count; ++i) steps.push_back({i});
    for (int i = 0; i < 2; ++i) runner.Run(steps);
    const int64_t launches = TheCounts().launches, waits = TheCounts().synchronizations;
    const int64_t replays = TheCounts().replays, allocations = TheCounts().allocations;
    runner.Run(steps);
    EXPECT_EQ(TheCounts().launches - launches, 2) << count;
    EXPECT_EQ(TheCounts().replays - replays, 1) << count;
    EXPECT_EQ(TheCounts().synchronizations - waits, 1) << count;
    EXPECT_EQ(TheCounts().allocations - allocations, 0) << count;
  }
}

// The old weights stay where they are, or are freed, where a graph would find them. The new ones
// come from the GPU: nothing but their stream, the default one, says when they are all there.
TEST(GpuGraphsTest, APassAfterAnUpdateHasTheNewWeights) {
  const simulated_gpu::WithKernels kernels;
  const auto model = TinyModel("llama", {}, {.placement = {.device = kGpu}}, /*seed=*/9);
  for (const bool keeps_old : {true, false}) {
    std::map<Passes, std::vector<std::vector<SampledToken>>> results;
    for (const Passes passes : {Passes::kEager, Passes::kGraphs}) {
      Runner runner("llama", at::kFloat, passes, /*count=*/2);
      const auto run = [&] { results[passes].push_back(runner.Run({{0}, {1}})); };
      for (int i = 0; i < 3; ++i) run();
      std::unique_ptr<PreparedWeights> weights = runner.runner().model().PrepareWeights();
      for (const auto& [name, tensor] : model->Parameters()) {
        ASSERT_TRUE(weights->Add(name, tensor).ok());
      }
      runner.runner().model().Adopt(*weights);
      runner.runner().OnNewWeights();
      if (!keeps_old) weights.reset();
      for (int i = 0; i < 3; ++i) run();
    }
    for (size_t i = 0; i < results[Passes::kGraphs].size(); ++i) {
      ExpectSameBits(results[Passes::kGraphs][i], results[Passes::kEager][i]);
    }
  }
}

// Rows whose distribution is wanted, or which verify a draft, come to the host.
TEST(GpuGraphsTest, PassesOfDecodingAloneAreTaken) {
  const c10::InferenceMode inference_mode;
  const simulated_gpu::WithKernels kernels;
  const auto model = TinyModel("qwen3_moe", {}, {.placement = {.device = kGpu}});
  KvCache cache(model->CacheLayout(), 8, kGpu, at::kFloat, model->config().RoutingLayout());
  const DecodeGraphs graphs(*model, cache, kMaxTokens);
  const SamplingParams sampling;
  const std::vector<int32_t> blocks = {0, 1, 2, 3}, tokens(17, 1);
  const std::vector<int64_t> wanted = {0};
  const std::span<const int32_t> all(tokens);
  const DecodeInput one = {
      .blocks = blocks, .start = 3, .tokens = all.first(1), .output_rows = wanted};
  const OutputRow draw = {.sampling = &sampling};
  const auto takes = [&](const DecodeInput& input, const OutputRow& row, size_t count = 1) {
    const std::vector<DecodeInput> inputs(count, input);
    const std::vector<OutputRow> rows(count, row);
    return graphs.Takes({.copies = {}, .sequences = inputs, .rows = rows});
  };
  EXPECT_TRUE(takes(one, draw));
  EXPECT_TRUE(takes(one, draw, 256));
  EXPECT_FALSE(takes(one, draw, 257));
  DecodeInput other = one;
  other.tokens = all.first(16);
  EXPECT_TRUE(takes(other, draw));
  other.tokens = all;
  EXPECT_FALSE(takes(other, draw)) << "FlashAttention may take it";
  other = one;
  other.start = kMaxTokens;
  EXPECT_FALSE(takes(other, draw));
  other = one;
  other.records_routing = true;
  EXPECT_FALSE(takes(other, draw));
  OutputRow row = draw;
  row.num_top = 1;
  EXPECT_FALSE(takes(one, row));
  EXPECT_FALSE(graphs.Takes({.copies = {}, .sequences = {&one, 1}, .rows = {}}));
}

TEST(GpuGraphsTest, WhatCannotBeCapturedIsRefused) {
  const LoadOptions on_gpu = {.placement = {.device = kGpu}};
  const auto check = [](const Model& model) {
    return DecodeGraphs::CheckSupported(model, DType::kFloat32);
  };
  EXPECT_EQ(check(*TinyModel()).code(), absl::StatusCode::kUnimplemented) << "a CPU";
  EXPECT_EQ(check(*TinyModel("llama", {}, on_gpu)).code(), absl::StatusCode::kUnimplemented)
      << "no kernel";
  const simulated_gpu::WithKernels kernels;
  EXPECT_TRUE(check(*TinyModel("llama", {}, on_gpu)).ok());
  EXPECT_EQ(check(*TinyModel("deepseek_v3", {}, on_gpu)).code(), absl::StatusCode::kUnimplemented);
}

TEST(GpuGraphsTest, RowsArePaddedToFewShapes) {
  std::set<int64_t> shapes;
  for (int64_t rows = 1; rows <= kMaxDecodeRows; ++rows) {
    EXPECT_GE(PaddedDecodeRows(rows), rows);
    shapes.insert(PaddedDecodeRows(rows));
  }
  EXPECT_EQ(shapes, (std::set<int64_t>{1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192,
                                       224, 256}));
}

}  // namespace
}  // namespace tandem::rollout
