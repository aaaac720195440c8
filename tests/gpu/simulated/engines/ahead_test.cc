// Passes that start before the host has the tokens that they consume.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/coauthoring/tandem_config.h"
#include "common/model/testing/models.h"
#include "common/ops/products/fixed_rows.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/kernels.h"

namespace tandem::rollout {
namespace {

using simulated_gpu::TheCounts;

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kPasses = 8;
constexpr int32_t kSequences = 3, kBlocks = 3;  // of a sequence

// The host's costs of a pass.
struct Costs {
  int64_t waits, allocations, ahead;
};

// Sequences of one runner that are written for some passes, a token each.
class Writer {
 public:
  Writer(const std::string& family, bool graphs)
      : runner_(TinyModel(family, {}, {.placement = {.device = kGpu}}), kBlocks * kSequences,
                DType::kFloat32, /*speculator=*/nullptr, TorchRunner::Adapters::kOn,
                TorchRunner::NewStream(kGpu), graphs ? std::optional(200) : std::nullopt) {
    for (int32_t s = 0; s < kSequences; ++s) {
      blocks_.push_back({s, s + kSequences, s + 2 * kSequences});
    }
  }

  // Returns the tokens of each pass: those of prompts, and of kPasses passes behind them, which
  // start `ahead` of the results of the pass before, or when the host has them.
  std::vector<PassResults> Write(bool ahead) {
    const std::vector<int64_t> lengths = {60, 9, 126};
    std::vector<std::vector<int32_t>> tokens;
    for (const int64_t length : lengths) {
      tokens.emplace_back();
      for (int64_t i = 0; i < length; ++i) {
        tokens.back().push_back(static_cast<int32_t>(i * (length % 7 + 3) % 50));
      }
    }
    std::vector<PassResults> results(kPasses + 1);
    Start(tokens, {0, 0, 0}, /*follows=*/false, results[0]);
    if (!ahead) Finish();
    for (int64_t pass = 1; pass <= kPasses; ++pass) {
      const Costs before = Now();
      std::vector<int64_t> starts = lengths;
      for (size_t s = 0; s < tokens.size(); ++s) {
        starts[s] += pass - 1;
        // The number of the sequence's row, or the token that was drawn from it.
        tokens[s] = {ahead ? static_cast<int32_t>(s)
                           : results[static_cast<size_t>(pass) - 1][s].value().token};
      }
      Start(tokens, starts, /*follows=*/ahead, results[static_cast<size_t>(pass)]);
      Finish();
      const Costs after = Now();
      last_ = {.waits = after.waits - before.waits,
               .allocations = after.allocations - before.allocations,
               .ahead = after.ahead - before.ahead};
    }
    if (ahead) Finish();
    return results;
  }

  // The costs of the last pass of a Write.
  const Costs& last() const { return last_; }

 private:
  static Costs Now() {
    return {.waits = TheCounts().synchronizations,
            .allocations = TheCounts().allocations,
            .ahead = TheCounts().ahead};
  }

  void Start(const std::vector<std::vector<int32_t>>& tokens, const std::vector<int64_t>& starts,
             bool follows, PassResults& results) {
    std::vector<std::vector<int64_t>> wanted;
    std::vector<DecodeInput> inputs;
    std::vector<OutputRow> rows;
    for (const auto& of_sequence : tokens) wanted.push_back({std::ssize(of_sequence) - 1});
    for (size_t s = 0; s < tokens.size(); ++s) {
      inputs.push_back({.blocks = blocks_[s],
                        .start = starts[s],
                        .tokens = tokens[s],
                        .output_rows = wanted[s]});
      const int64_t drawn = starts[s] + std::ssize(tokens[s]);
      rows.push_back(
          {.u = static_cast<double>(drawn * 7919 % 1009) / 1009, .sampling = &sampling_[s % 2]});
    }
    const absl::Status status = runner_.Start(
        {.copies = {}, .sequences = inputs, .rows = rows, .follows = follows}, results);
    ASSERT_TRUE(status.ok()) << status;
  }

  void Finish() {
    const absl::Status status = runner_.Finish();
    ASSERT_TRUE(status.ok()) << status;
  }

  const SamplingParams sampling_[2] = {{.temperature = 1.5}, {.temperature = 0.9, .top_p = 0.8}};
  std::vector<std::vector<int32_t>> blocks_;
  TorchRunner runner_;
  Costs last_ = {};
};

void ExpectSame(const std::vector<PassResults>& actual, const std::vector<PassResults>& expected) {
  for (size_t pass = 0; pass < expected.size(); ++pass) {
    ASSERT_EQ(actual[pass].size(), expected[pass].size());
    for (size_t row = 0; row < expected[pass].size(); ++row) {
      SCOPED_TRACE(testing::Message() << "pass " << pass << ", row " << row);
      EXPECT_EQ(actual[pass][row]->token, expected[pass][row]->token);
      EXPECT_EQ(actual[pass][row]->logprob, expected[pass][row]->logprob);
      EXPECT_EQ(actual[pass][row]->log_keep_mass, expected[pass][row]->log_keep_mass);
    }
  }
}

// One wait a pass, before which the next one has begun; and the bits of passes in turns.
TEST(GpuAheadTest, APassReadsItsTokensFromTheOneBefore) {
  const simulated_gpu::WithKernels kernels;
  for (const std::string& family : EveryFamily()) {
    SCOPED_TRACE(family);
    Writer in_turns(family, /*graphs=*/false), ahead(family, /*graphs=*/false);
    const std::vector<PassResults> expected = in_turns.Write(/*ahead=*/false);
    EXPECT_EQ(in_turns.last().ahead, 0);
    EXPECT_EQ(in_turns.last().waits, 1);
    ExpectSame(ahead.Write(/*ahead=*/true), expected);
    EXPECT_GT(ahead.last().ahead, 0);
    EXPECT_EQ(ahead.last().waits, 1);
  }
}

// The shapes repeat: the first pass of one is eager, then there is a capture, then replays.
TEST(GpuAheadTest, SoDoGraphs) {
  const simulated_gpu::WithKernels kernels;
  for (const std::string family : {"llama", "gemma2", "qwen3_moe"}) {
    SCOPED_TRACE(family);
    Writer in_turns(family, /*graphs=*/true), ahead(family, /*graphs=*/true);
    const std::vector<PassResults> expected = in_turns.Write(/*ahead=*/false);
    const int64_t replays = TheCounts().replays;
    ExpectSame(ahead.Write(/*ahead=*/true), expected);
    EXPECT_EQ(TheCounts().replays - replays, kPasses - 1);
    EXPECT_GT(ahead.last().ahead, 0);
    EXPECT_EQ(ahead.last().waits, 1);
    EXPECT_EQ(ahead.last().allocations, 0);
  }
}

// A part of a prompt: nothing is drawn from it.
TEST(GpuAheadTest, TheHostWaitsForAPassWithoutRows) {
  TorchRunner runner(TinyModel("llama", {}, {.placement = {.device = kGpu}}), /*num_blocks=*/1,
                     DType::kFloat32, /*speculator=*/nullptr, TorchRunner::Adapters::kOn,
                     TorchRunner::NewStream(kGpu));
  const std::vector<int32_t> blocks = {0}, tokens = {1, 2, 3};
  const DecodeInput input = {.blocks = blocks, .start = 0, .tokens = tokens, .output_rows = {}};
  const int64_t waits = TheCounts().synchronizations;
  PassResults results;
  ASSERT_TRUE(runner.Run({.copies = {}, .sequences = {&input, 1}, .rows = {}}, results).ok());
  EXPECT_EQ(TheCounts().synchronizations - waits, 1);
}

// Engines of tiny models whose bits do not depend on the company of a row: a response that a token
// has ended has a row in one pass more.
class GpuAheadEngineTest : public testing::Test {
 protected:
  GpuAheadEngineTest() {
    WriteTinyModelAndTokenizer(folder_.path() + "/senior", 1);
    WriteTinyModelAndTokenizer(folder_.path() + "/junior", 2);
  }
  ~GpuAheadEngineTest() override { ops::SetProductRows(0); }

  // With `in_turns` the host has the tokens of each pass before it plans the next one.
  std::unique_ptr<Engine> Create(bool in_turns, bool graphs = false) {
    EngineOptions options = TinyOptions(folder_.path());
    options.compute.device = "cuda";
    options.compute.product_rows = 16;
    options.senior.enforce_eager = options.junior.enforce_eager = !graphs;
    options.eager_lanes = in_turns;
    auto engine = CreateEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  // Requests that end by their tokens and by their lengths, more than run at once.
  static std::vector<PromptRequest> Requests(int count, const TandemConfig& tandem) {
    std::vector<PromptRequest> requests;
    for (int i = 0; i < count; ++i) {
      requests.push_back(RequestOf(tandem, static_cast<uint64_t>(i)));
      requests.back().sampling.stop_token_ids = {5, 20, 33};
      requests.back().sampling.max_tokens = 20 + i;
      requests.back().sampling.top_p = i % 2 == 0 ? 0.9 : 1.0;
    }
    return requests;
  }

  static std::vector<Trajectory> Responses(
      Engine& engine, const std::vector<std::shared_ptr<RecordingListener>>& listeners) {
    std::vector<Trajectory> responses;
    for (const auto& listener : listeners) {
      listener->Wait();
      EXPECT_EQ(listener->failure(), std::nullopt);
      responses.push_back(listener->finished().at(0));
    }
    // Those of the last pass are counted when it has ended.
    while (engine.Stats().sequences_running > 0) absl::SleepFor(absl::Milliseconds(1));
    return responses;
  }

  const simulated_gpu::WithKernels kernels_;
  const TemporaryFolder folder_;
};

TEST_F(GpuAheadEngineTest, ResponsesHaveTheBitsOfPassesInTurns) {
  for (const bool graphs : {false, true}) {
    for (const TandemConfig& tandem :
         {TandemConfig{.enabled = false},
          TandemConfig{.selection_strategy = SelectionStrategy::kTurn}}) {
      const std::vector<PromptRequest> requests = Requests(24, tandem);
      const auto in_turns = Create(/*in_turns=*/true, graphs);
      const int64_t before = TheCounts().ahead;
      const std::vector<Trajectory> expected = Responses(*in_turns, Submit(*in_turns, requests));
      EXPECT_EQ(TheCounts().ahead, before);
      const auto engine = Create(/*in_turns=*/false, graphs);
      EXPECT_EQ(Responses(*engine, Submit(*engine, requests)), expected);
      EXPECT_GT(TheCounts().ahead, before);
      // Again, with the tables that the first passes have made.
      const int64_t waits = TheCounts().synchronizations;
      const int64_t passes = engine->Stats().forward_passes_total;
      EXPECT_EQ(Responses(*engine, Submit(*engine, requests)), expected);
      EXPECT_EQ(TheCounts().synchronizations - waits,
                engine->Stats().forward_passes_total - passes);
      EXPECT_GT(std::ranges::count(expected, FinishReason::kStop, &Trajectory::finish_reason), 3);
      EXPECT_GT(std::ranges::count(expected, FinishReason::kLength, &Trajectory::finish_reason), 3);
    }
  }
}

// Scores run on the same model, and a pause holds sequences: both come when no pass runs.
TEST_F(GpuAheadEngineTest, ScoresPausesAndUpdatesComeBetweenPasses) {
  std::vector<PromptRequest> requests = Requests(6, {.enabled = false});
  for (PromptRequest& request : requests) {
    request.sampling.stop_token_ids.clear();
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = 90;
    request.stream_tokens = true;
  }
  const ScoreRequest texts = {
      .sequences = {{.token_ids = {3, 9, 21, 40, 8}, .first_scored_token = 2}}};
  const auto engine = Create(/*in_turns=*/false);
  const std::vector<Trajectory> expected = Responses(*engine, Submit(*engine, requests));
  const auto expected_score = Score(*engine, texts);
  ASSERT_TRUE(expected_score.ok()) << expected_score.status();
  std::vector<std::byte> stream;
  const auto same = Model::Load(folder_.path() + "/senior");
  ASSERT_TRUE(same.ok()) << same.status();
  const auto listeners = Submit(*engine, requests);
  for (const size_t tokens : {5, 20, 40}) {
    listeners[0]->WaitForTokens(tokens);
    const auto score = Score(*engine, texts);
    ASSERT_TRUE(score.ok()) << score.status();
    EXPECT_EQ(score->sequences[0].senior_logprobs, expected_score->sequences[0].senior_logprobs);
    ASSERT_TRUE(engine->Pause({}).ok());
    const size_t paused_at = listeners[0]->deltas().size();
    stream.clear();
    const WeightManifest manifest = ManifestOf(**same, static_cast<int64_t>(tokens), stream);
    const std::string id = std::to_string(tokens);
    ASSERT_TRUE(engine->weights().Begin(id, manifest, false).ok());
    ASSERT_TRUE(engine->weights().Append(id, 0, stream).ok());
    EXPECT_EQ(listeners[0]->deltas().size(), paused_at);
    ASSERT_TRUE(engine->Resume({}).ok());
    ASSERT_TRUE(engine->weights().Commit(id, {}).ok());
  }
  const std::vector<Trajectory> actual = Responses(*engine, listeners);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].response_token_ids, expected[i].response_token_ids);
    EXPECT_EQ(actual[i].author_logprobs, expected[i].author_logprobs);
  }
}

}  // namespace
}  // namespace tandem::rollout
