// The laws of tandem rollouts over real (tiny, random) models, through the public interface.
#include "services/rollout/engine/engine.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/base/errors/error.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/vocabulary.h"
#include "common/model/testing/padded_model.h"
#include "common/speculator/speculator_files.h"
#include "common/speculator/speculator_update.h"
#include "common/weights/testing/stream_digest.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/gate.h"
#include "services/rollout/engine/testing/random_speculator.h"
#include "services/rollout/engine/testing/recording_listener.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"

namespace tandem::rollout {
namespace {

using ::testing::HasSubstr;

class EngineTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    WriteTinyModelAndTokenizer(Senior(), 1);
    WriteTinyModelAndTokenizer(Junior(), 2, {{"num_hidden_layers", 1}, {"hidden_size", 24}});
  }
  static void TearDownTestSuite() { delete folder_; }
  static std::string Senior() { return folder_->path() + "/senior"; }
  static std::string Junior() { return folder_->path() + "/junior"; }

  static EngineOptions Options() { return TinyOptions(folder_->path()); }
  static std::unique_ptr<Engine> Create(const EngineOptions& options = Options()) {
    auto engine = CreateEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  static std::unique_ptr<Engine> CreateSelfPaired() {
    EngineOptions options = Options();
    options.junior.model = Senior();
    return Create(options);
  }

  static TemporaryFolder* folder_;
};

TemporaryFolder* EngineTest::folder_ = nullptr;

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << i;
}

TEST_F(EngineTest, Law1EqualModelsGreedyGiveTheSoloTokens) {
  const auto engine = CreateSelfPaired();
  PromptRequest solo = RequestOf({.enabled = false});
  solo.sampling.temperature = 0;
  const Trajectory expected = RunOne(*engine, solo);
  for (const auto strategy : kStrategies) {
    for (const double prob_senior : {0.0, 0.5, 1.0}) {
      PromptRequest request =
          RequestOf({.selection_strategy = strategy, .prob_senior = prob_senior});
      request.sampling.temperature = 0;
      const Trajectory t = RunOne(*engine, request);
      EXPECT_EQ(t.response_token_ids, expected.response_token_ids);
      EXPECT_EQ(t.author_logprobs, expected.author_logprobs);
    }
  }
}

TEST_F(EngineTest, Law2CertainSeniorIsTandemSwitchedOffBitForBit) {
  const auto engine = Create();
  const Trajectory off = RunOne(*engine, RequestOf({.enabled = false}));
  const Trajectory on = RunOne(*engine, RequestOf({.prob_senior = 1.0}));
  EXPECT_EQ(on.response_token_ids, off.response_token_ids);
  EXPECT_EQ(on.author_logprobs, off.author_logprobs);
  EXPECT_EQ(on.authorship_mask, off.authorship_mask);
  EXPECT_TRUE(off.other_logprobs.empty());
  EXPECT_TRUE(off.junior_version.empty());
  EXPECT_EQ(on.junior_version, engine->Info().junior_version);
}

TEST_F(EngineTest, Law2CertainJuniorIsTheJuniorAlone) {
  const Trajectory mixed = RunOne(*Create(), RequestOf({.prob_senior = 0.0}));
  EngineOptions options = Options();
  options.senior.model = Junior();
  options.junior.model = "";
  const Trajectory alone = RunOne(*Create(options), RequestOf({.enabled = false}));
  EXPECT_EQ(mixed.response_token_ids, alone.response_token_ids);
  EXPECT_EQ(mixed.author_logprobs, alone.author_logprobs);
}

TEST_F(EngineTest, Law3BatchingChunkingThreadsAndEagerLanesDoNotMatter) {
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 10; ++i) {
    PromptRequest request = RequestOf({.selection_strategy = kStrategies[i % 5]}, 50 + i);
    request.prompt_token_ids.resize(1 + i);
    request.num_samples = 1 + i % 3;
    request.return_other_logprobs = true;
    requests.push_back(request);
  }
  EngineOptions narrow = Options();
  narrow.max_num_seqs = 1;
  narrow.max_batched_tokens = 3;
  narrow.compute.num_threads = 1;
  EngineOptions eager = Options();
  eager.eager_lanes = true;
  const auto alone = Create(narrow);
  const auto expected = Submit(*alone, requests);
  for (const EngineOptions& options : {Options(), eager}) {
    const auto together = Create(options);
    const auto actual = Submit(*together, requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      expected[i]->Wait();
      actual[i]->Wait();
      ASSERT_EQ(actual[i]->finished().size(), expected[i]->finished().size());
      for (const auto& [index, a] : actual[i]->finished()) {
        const Trajectory b = expected[i]->finished().at(index);
        EXPECT_EQ(a.response_token_ids, b.response_token_ids);
        EXPECT_EQ(a.authorship_mask, b.authorship_mask);
        ExpectNear(a.author_logprobs, b.author_logprobs, 0.0f);
        ExpectNear(a.other_logprobs, b.other_logprobs, 0.0f);
      }
    }
  }
}

TEST_F(EngineTest, ABfloat16CacheChangesNoLaw) {
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 10; ++i) {
    PromptRequest request = RequestOf({.selection_strategy = kStrategies[i % 5]}, 50 + i);
    request.num_samples = 1 + i % 3;
    request.return_other_logprobs = true;
    request.sampling.max_tokens = 90;  // into a second block
    request.sampling.ignore_eos = true;
    requests.push_back(request);
  }
  EngineOptions wide = Options();
  wide.kv_cache_dtype = DType::kBFloat16;
  EngineOptions narrow = wide;
  narrow.max_num_seqs = 2;
  narrow.max_batched_tokens = 3;
  narrow.compute.num_threads = 1;
  // The smallest cache: two blocks of each lane for sequences that come to need two each.
  EngineOptions preempting = wide;
  preempting.free_memory.host = 1;
  std::vector<std::vector<Trajectory>> runs;
  std::vector<int64_t> preemptions;
  for (const EngineOptions& options : {wide, narrow, preempting, Options()}) {
    const auto engine = Create(options);
    std::vector<Trajectory>& run = runs.emplace_back();
    for (const auto& listener : Submit(*engine, requests)) {
      listener->Wait();
      for (const auto& [index, t] : listener->finished()) run.push_back(t);
    }
    preemptions.push_back(engine->Stats().preemptions_total);
  }
  ASSERT_EQ(runs[0].size(), 19u);
  EXPECT_EQ(preemptions[0], 0);
  EXPECT_GT(preemptions[2], 0);
  for (const size_t other : {1, 2}) {
    for (size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_EQ(runs[other][i].response_token_ids, runs[0][i].response_token_ids);
      EXPECT_EQ(runs[other][i].author_logprobs, runs[0][i].author_logprobs);
      EXPECT_EQ(runs[other][i].other_logprobs, runs[0][i].other_logprobs);
    }
  }
  EXPECT_NE(runs[3][0].author_logprobs, runs[0][0].author_logprobs) << "keys are not rounded";
}

// The senior attends to windows, so that its blocks are given back and others write into them; the
// junior does not.
TEST_F(EngineTest, BlocksThatAreGivenBackChangeNoBit) {
  const TemporaryFolder folder;
  const nlohmann::json window = {{"sliding_window", 70}};
  WriteTinyModelAndTokenizer(folder.path() + "/senior", 1, window, "mistral");
  WriteTinyModelAndTokenizer(folder.path() + "/junior", 2);
  EngineOptions wide = TinyOptions(folder.path());
  wide.senior.max_model_len = wide.junior.max_model_len = 250;
  EngineOptions narrow = wide;  // room for the longest sequence of either lane
  narrow.free_memory.host = 1;
  narrow.max_batched_tokens = 20;
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 6; ++i) {
    // Two of three are the senior's alone.
    PromptRequest request = RequestOf({.enabled = i % 3 == 0, .prob_senior = 0.5}, 70 + i);
    for (int32_t token = 0; token < 110; ++token)
      request.prompt_token_ids.push_back(3 + token % 50);
    request.num_samples = 2;
    request.return_other_logprobs = i == 0;
    request.sampling.max_tokens = 130;
    request.sampling.ignore_eos = true;
    requests.push_back(request);
  }
  std::vector<std::vector<Trajectory>> runs;
  for (const EngineOptions& options : {wide, narrow}) {
    const auto engine = Create(options);
    std::vector<Trajectory>& run = runs.emplace_back();
    for (const auto& listener : Submit(*engine, requests)) {
      listener->Wait();
      for (const auto& [index, t] : listener->finished()) run.push_back(t);
    }
    // The log-probabilities written through the cache are those of a pass over the whole sequence.
    const Trajectory& t = run[2];
    std::vector<int32_t> tokens = t.prompt_token_ids;
    tokens.insert(tokens.end(), t.response_token_ids.begin(), t.response_token_ids.end());
    const auto prompt_length = static_cast<int64_t>(t.prompt_token_ids.size());
    const auto scores =
        Score(*engine, {.sequences = {{tokens, prompt_length}}, .senior = true, .junior = false});
    ASSERT_TRUE(scores.ok()) << scores.status();
    EXPECT_EQ(scores->sequences[0].senior_logprobs, t.author_logprobs);
  }
  ASSERT_EQ(runs[0].size(), 12u);
  for (size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_EQ(runs[1][i].response_token_ids, runs[0][i].response_token_ids) << i;
    EXPECT_EQ(runs[1][i].author_logprobs, runs[0][i].author_logprobs) << i;
    EXPECT_EQ(runs[1][i].other_logprobs, runs[0][i].other_logprobs) << i;
  }
}

TEST_F(EngineTest, ScoresOfABfloat16CacheHaveTheBitsOfTheResponse) {
  EngineOptions options = Options();
  options.kv_cache_dtype = DType::kBFloat16;
  const auto engine = Create(options);
  PromptRequest request = RequestOf({.selection_strategy = SelectionStrategy::kWord});
  request.return_other_logprobs = true;
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  const Trajectory t = RunOne(*engine, request);
  std::vector<int32_t> tokens = t.prompt_token_ids;
  tokens.insert(tokens.end(), t.response_token_ids.begin(), t.response_token_ids.end());
  const auto prompt_length = static_cast<int64_t>(t.prompt_token_ids.size());
  const auto scores =
      Score(*engine, {.sequences = {{tokens, prompt_length}}, .senior = true, .junior = true});
  ASSERT_TRUE(scores.ok()) << scores.status();
  const SequenceScores& s = scores->sequences[0];
  for (size_t i = 0; i < t.response_token_ids.size(); ++i) {
    const bool senior = t.authorship_mask[i] == Author::kSenior;
    EXPECT_EQ(t.author_logprobs[i], senior ? s.senior_logprobs[i] : s.junior_logprobs[i]) << i;
    EXPECT_EQ(t.other_logprobs[i], senior ? s.junior_logprobs[i] : s.senior_logprobs[i]) << i;
  }
}

TEST_F(EngineTest, Law5LogProbsEqualRunningBothModelsOnEveryToken) {
  const auto engine = Create();
  for (const auto strategy : kStrategies) {
    PromptRequest request = RequestOf({.selection_strategy = strategy});
    request.return_other_logprobs = true;
    request.sampling.temperature = 0.7;
    const Trajectory t = RunOne(*engine, request);
    std::vector<int32_t> tokens = t.prompt_token_ids;
    tokens.insert(tokens.end(), t.response_token_ids.begin(), t.response_token_ids.end());
    const auto prompt_length = static_cast<int64_t>(t.prompt_token_ids.size());
    const auto scores = Score(*engine, {.sequences = {{tokens, prompt_length}},
                                        .senior = true,
                                        .junior = true,
                                        .temperature = 0.7});
    ASSERT_TRUE(scores.ok()) << scores.status();
    const SequenceScores& s = scores->sequences[0];
    ASSERT_EQ(s.senior_logprobs.size(), t.response_token_ids.size());
    for (size_t i = 0; i < t.response_token_ids.size(); ++i) {
      const bool senior = t.authorship_mask[i] == Author::kSenior;
      EXPECT_NEAR(t.author_logprobs[i], senior ? s.senior_logprobs[i] : s.junior_logprobs[i], 1e-5);
      EXPECT_NEAR(t.other_logprobs[i], senior ? s.junior_logprobs[i] : s.senior_logprobs[i], 1e-5);
    }
  }
}

TEST_F(EngineTest, ScoresEqualAForwardWithoutCache) {
  const auto model = *Model::Load(Senior());
  std::vector<ScoreSequence> sequences;
  for (int i = 0; i < 20; ++i) {
    ScoreSequence sequence;
    for (int j = 0; j < 5 + 4 * i; ++j) sequence.token_ids.push_back((i * 31 + j * 17) % 61);
    sequence.first_scored_token = 1 + i % 4;
    sequences.push_back(sequence);
  }
  const auto scores = Score(*Create(), {.sequences = sequences, .temperature = 2.0});
  ASSERT_TRUE(scores.ok()) << scores.status();
  const c10::InferenceMode inference_mode;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::vector<int64_t> tokens(sequences[i].token_ids.begin(), sequences[i].token_ids.end());
    CausalContext causal;
    const at::Tensor logprobs = at::log_softmax(
        model->ForwardLogits(model->HiddenStates(MakeRaggedBatch({tokens}), causal)) / 2.0, -1);
    std::vector<float> expected;
    for (size_t t = sequences[i].first_scored_token; t < tokens.size(); ++t) {
      expected.push_back(logprobs[static_cast<int64_t>(t) - 1][tokens[t]].item<float>());
    }
    ExpectNear(scores->sequences[i].senior_logprobs, expected, 1e-5f);
    EXPECT_TRUE(scores->sequences[i].junior_logprobs.empty());
  }
}

// ATen kernels, which a GPU runs, give the scores of the CPU's kernels, in both types.
TEST_F(EngineTest, TheOtherKernelsAndTypesScoreAlike) {
  std::vector<ScoreSequence> sequences;
  for (int i = 0; i < 8; ++i) {
    ScoreSequence sequence = {.token_ids = {}, .first_scored_token = 1};
    for (int j = 0; j < 5 + 4 * i; ++j) sequence.token_ids.push_back((i * 31 + j * 17) % 61);
    sequences.push_back(sequence);
  }
  const ScoreRequest request = {.sequences = sequences, .senior = true, .junior = true};
  const auto scores_with = [&](const std::string& kernels, DType dtype,
                               std::optional<DType> cache = std::nullopt) {
    EngineOptions options = Options();
    options.kv_cache_dtype = cache;
    options.compute.kernels = kernels;
    options.senior.dtype = options.junior.dtype = dtype;
    const auto scores = Score(*Create(options), request);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.value_or(ScoreResult{}).sequences;
  };
  const auto expected = scores_with("auto", DType::kFloat32);
  const auto aten = scores_with("aten", DType::kFloat32);
  const auto bfloat16 = scores_with("aten", DType::kBFloat16);
  const auto cached = scores_with("auto", DType::kFloat32, DType::kBFloat16);
  const auto aten_cached = scores_with("aten", DType::kFloat32, DType::kBFloat16);
  ASSERT_EQ(expected.size(), sequences.size());
  ASSERT_EQ(aten.size(), sequences.size());
  ASSERT_EQ(bfloat16.size(), sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    ExpectNear(aten[i].senior_logprobs, expected[i].senior_logprobs, 1e-5f);
    ExpectNear(aten[i].junior_logprobs, expected[i].junior_logprobs, 1e-5f);
    ExpectNear(bfloat16[i].senior_logprobs, expected[i].senior_logprobs, 0.1f);
    ExpectNear(bfloat16[i].junior_logprobs, expected[i].junior_logprobs, 0.1f);
    EXPECT_NE(bfloat16[i].senior_logprobs, expected[i].senior_logprobs);
    // Keys and values alone are rounded. What the kernels compute otherwise may round otherwise.
    ExpectNear(cached[i].senior_logprobs, expected[i].senior_logprobs, 0.02f);
    ExpectNear(aten_cached[i].senior_logprobs, cached[i].senior_logprobs, 0.01f);
    ExpectNear(aten_cached[i].junior_logprobs, cached[i].junior_logprobs, 0.01f);
    EXPECT_NE(cached[i].senior_logprobs, expected[i].senior_logprobs);
  }
}

TEST_F(EngineTest, ADeviceThatIsNotThereIsRefusedByName) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  EngineOptions options = Options();
  options.compute.device = "cuda";
  const auto refused = CreateEngine(options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(refused), "compute.device");
}

TEST_F(EngineTest, TheSameBatchTwiceIsTheSame) {
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(RequestOf({.selection_strategy = kStrategies[i % 5]}, i));
    requests.back().num_samples = 4;
  }
  std::vector<std::vector<Trajectory>> runs(2);
  for (auto& run : runs) {
    const auto engine = Create();
    for (const auto& listener : Submit(*engine, requests)) {
      listener->Wait();
      for (const auto& [index, t] : listener->finished()) run.push_back(t);
    }
  }
  ASSERT_EQ(runs[0].size(), 24u);
  for (size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_EQ(runs[0][i].response_token_ids, runs[1][i].response_token_ids);
    EXPECT_EQ(runs[0][i].author_logprobs, runs[1][i].author_logprobs);
  }
}

TEST_F(EngineTest, BadRequestsAreNamed) {
  const auto engine = Create();
  PromptRequest request = RequestOf({});
  request.prompt_token_ids[2] = 61;
  EXPECT_EQ(FieldPath(engine->Validate(request)), "prompt_token_ids[2]");
  request = RequestOf({});
  request.sampling.top_p = 0;
  EXPECT_EQ(FieldPath(engine->Validate(request)), "sampling.top_p");
  request = RequestOf({.prob_senior = 2});
  EXPECT_EQ(FieldPath(engine->Validate(request)), "tandem.prob_senior");
  request = RequestOf({});
  request.prompt_token_ids.assign(128, 3);
  EXPECT_EQ(engine->Validate(request).code(), absl::StatusCode::kOutOfRange);
  request = RequestOf({});
  request.num_samples = 0;
  EXPECT_EQ(FieldPath(engine->Submit({{RequestOf({}), nullptr}, {request, nullptr}}).status()),
            "prompts[1].num_samples");

  EngineOptions solo = Options();
  solo.junior.model = "";
  const auto alone = Create(solo);
  EXPECT_EQ(alone->Validate(RequestOf({})).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Score(*alone, {.sequences = {{{3, 4}, 1}}, .junior = true}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(EngineTest, EveryLaneHasALengthOfItsOwn) {
  EngineOptions options = Options();
  options.senior.max_model_len = 40;
  options.junior.max_model_len = 20;
  const auto engine = Create(options);
  EXPECT_EQ(engine->Info().senior.max_model_len, 40);
  EXPECT_EQ(engine->Info().junior->max_model_len, 20);

  PromptRequest solo = RequestOf({.enabled = false}), pair = RequestOf({});
  solo.sampling.ignore_eos = pair.sampling.ignore_eos = true;
  solo.sampling.max_tokens = pair.sampling.max_tokens = 100;
  const auto room = [](const PromptRequest& request, size_t limit) {
    return limit - request.prompt_token_ids.size();
  };
  EXPECT_EQ(RunOne(*engine, solo).response_token_ids.size(), room(solo, 40));
  const Trajectory cut = RunOne(*engine, pair);
  EXPECT_EQ(cut.response_token_ids.size(), room(pair, 20));
  EXPECT_EQ(cut.finish_reason, FinishReason::kLength);
  solo.prompt_token_ids.assign(20, 3);
  pair.prompt_token_ids.assign(20, 3);
  EXPECT_TRUE(engine->Validate(solo).ok());
  EXPECT_EQ(FieldPath(engine->Validate(pair)), "prompt_token_ids");

  const ScoreSequence long_one = {std::vector<int32_t>(30, 3), 1};
  EXPECT_TRUE(Score(*engine, {.sequences = {long_one}}).ok());
  EXPECT_EQ(Score(*engine, {.sequences = {long_one}, .junior = true}).status().code(),
            absl::StatusCode::kOutOfRange);
}

// Returns the log-probs of both models for one text.
SequenceScores ScoresOf(Engine& engine) {
  std::vector<int32_t> text;
  for (int32_t i = 0; i < 40; ++i) text.push_back(3 + i * 7 % 58);
  return Score(engine, {.sequences = {{text, 1}}, .junior = true})->sequences[0];
}

double LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max<double>(largest, std::abs(a[i] - b[i]));
  return largest;
}

TEST_F(EngineTest, EveryLaneComputesInATypeOfItsOwn) {
  EngineOptions options = Options();
  options.compute.kernels = "aten";
  const SequenceScores plain = ScoresOf(*Create(options));
  options.junior.dtype = DType::kBFloat16;
  const SequenceScores mixed = ScoresOf(*Create(options));
  EXPECT_EQ(mixed.senior_logprobs, plain.senior_logprobs);
  EXPECT_NE(mixed.junior_logprobs, plain.junior_logprobs);
  EXPECT_LT(LargestDifference(mixed.junior_logprobs, plain.junior_logprobs), 0.3);
  const EngineInfo info = Create(options)->Info();
  EXPECT_EQ(info.senior.dtype, DType::kFloat32);
  EXPECT_EQ(info.junior->dtype, DType::kBFloat16);
}

struct Stored {
  const char* name;
  DType dtype;
  Quantization quantization;
  double atol;  // of a log-prob, from that of the float32 model
};

class StoredLaneTest : public EngineTest, public ::testing::WithParamInterface<Stored> {};

TEST_P(StoredLaneTest, EveryLaneIsStoredInAFormatOfItsOwn) {
  const auto store = [](LaneOptions& lane) {
    lane.dtype = GetParam().dtype;
    lane.quantization = GetParam().quantization;
  };
  const SequenceScores plain = ScoresOf(*Create());
  EngineOptions senior = Options(), junior = Options();
  store(senior.senior);
  store(junior.junior);
  const SequenceScores of_senior = ScoresOf(*Create(senior)), of_junior = ScoresOf(*Create(junior));
  EXPECT_EQ(of_senior.junior_logprobs, plain.junior_logprobs);
  EXPECT_EQ(of_junior.senior_logprobs, plain.senior_logprobs);
  EXPECT_NE(of_senior.senior_logprobs, plain.senior_logprobs) << "the maps are not rounded";
  EXPECT_NE(of_junior.junior_logprobs, plain.junior_logprobs) << "the maps are not rounded";
  EXPECT_LT(LargestDifference(of_senior.senior_logprobs, plain.senior_logprobs), GetParam().atol);
  EXPECT_LT(LargestDifference(of_junior.junior_logprobs, plain.junior_logprobs), GetParam().atol);

  const auto engine = Create(junior);
  EXPECT_EQ(engine->Info().junior->dtype, GetParam().dtype);
  EXPECT_EQ(engine->Info().junior->quantization, GetParam().quantization);
  EXPECT_EQ(engine->Info().senior.quantization, Quantization::kNone);
  EXPECT_EQ(RunOne(*engine, RequestOf({.enabled = false})).author_logprobs,
            RunOne(*Create(), RequestOf({.enabled = false})).author_logprobs);
}

TEST_P(StoredLaneTest, NewWeightsAreStoredAsTheOldOnesWere) {
  EngineOptions stored = Options();
  stored.senior.dtype = GetParam().dtype;
  stored.senior.quantization = GetParam().quantization;
  const SequenceScores expected = ScoresOf(*Create(stored));
  const TemporaryFolder other;
  WriteTinyModelAndTokenizer(other.path(), 9);
  stored.senior.model = other.path();
  const auto engine = Create(stored);
  EXPECT_NE(ScoresOf(*engine).senior_logprobs, expected.senior_logprobs);
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(**Model::Load(Senior()), 1, stream);
  ASSERT_TRUE(engine->weights().Begin("u", manifest, false).ok());
  ASSERT_TRUE(engine->weights().Append("u", 0, stream).ok());
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  EXPECT_EQ(ScoresOf(*engine).senior_logprobs, expected.senior_logprobs);
}

// The bits are those that the lane makes of float32 values; what it quantises comes in float32.
TEST_P(StoredLaneTest, ASenderMayRoundWhatTheLaneRounds) {
  const auto model = *Model::Load(Senior());
  for (const char* kernels : {"auto", "aten"}) {
    EngineOptions stored = Options();
    stored.compute.kernels = kernels;
    stored.senior.dtype = GetParam().dtype;
    stored.senior.quantization = GetParam().quantization;
    if (std::string(kernels) == "aten" && GetParam().quantization != Quantization::kNone) continue;
    const SequenceScores expected = ScoresOf(*Create(stored));
    const TemporaryFolder other;
    WriteTinyModelAndTokenizer(other.path(), 9);
    stored.senior.model = other.path();
    const auto engine = Create(stored);
    EXPECT_NE(ScoresOf(*engine).senior_logprobs, expected.senior_logprobs);
    const TensorTypes types = engine->weights().WantedTypes();
    const bool rounds = GetParam().dtype == DType::kBFloat16;
    EXPECT_EQ(types.contains("model.embed_tokens.weight"), rounds);
    EXPECT_EQ(types.contains("model.norm.weight"), rounds && std::string(kernels) == "aten");
    std::vector<std::byte> stream;
    const WeightManifest manifest = ManifestOf(*model, 1, stream, types);
    EXPECT_EQ(manifest.digest, model->weights_digest());
    ASSERT_TRUE(engine->weights().Begin("u", manifest, false).ok());
    ASSERT_TRUE(engine->weights().Append("u", 0, stream).ok());
    const auto served = engine->weights().Commit("u", {});
    ASSERT_TRUE(served.ok()) << served.status();
    EXPECT_EQ(served->digest, model->weights_digest());
    EXPECT_EQ(ScoresOf(*engine).senior_logprobs, expected.senior_logprobs) << kernels;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, StoredLaneTest,
                         testing::Values(Stored{"bfloat16", DType::kBFloat16, Quantization::kNone,
                                                0.3},
                                         Stored{"int8", DType::kFloat32, Quantization::kInt8, 0.3},
                                         Stored{"int4", DType::kFloat32, Quantization::kInt4, 3.0}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(EngineTest, ADifferentVocabularyIsRefusedWithTheFirstId) {
  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder.path(), 3);
  auto tokenizer = TinyTokenizerJson();
  tokenizer["model"]["vocab"].erase("w17");
  tokenizer["model"]["vocab"]["other"] = 17;
  std::ofstream(folder.path() + "/tokenizer.json") << tokenizer.dump();
  EngineOptions options = Options();
  options.junior.model = folder.path();
  const absl::Status status = CreateEngine(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(status), "VOCABULARY_MISMATCH");
  EXPECT_EQ(FieldPath(status), "junior.model");
  EXPECT_THAT(std::string(status.message()), HasSubstr("first differing id is 17"));
}

// Qwen2.5's models have one tokenizer and 151,936 or 152,064 rows.
TEST_F(EngineTest, PaddingRowsChangeNothing) {
  TemporaryFolder folder;
  EngineOptions padded = Options();
  padded.senior.model = folder / "senior";
  WritePaddedModel(Senior(), padded.senior.model, 70);
  const auto engine = Create(padded), plain = Create();
  const EngineInfo info = engine->Info();
  EXPECT_EQ(info.senior.vocab_size, 70);
  EXPECT_EQ(info.senior.num_token_ids, 61);
  EXPECT_EQ(info.junior->vocab_size, 61);
  EXPECT_EQ(info.senior.vocabulary_digest, info.junior->vocabulary_digest);
  for (const auto strategy : kStrategies) {
    PromptRequest request = RequestOf({.selection_strategy = strategy});
    request.return_other_logprobs = true;
    const Trajectory actual = RunOne(*engine, request), expected = RunOne(*plain, request);
    EXPECT_EQ(actual.response_token_ids, expected.response_token_ids);
    EXPECT_EQ(actual.author_logprobs, expected.author_logprobs);
    EXPECT_EQ(actual.other_logprobs, expected.other_logprobs);
  }
  const ScoreRequest score = {.sequences = {{{3, 4, 60, 17, 9}, 1}}};
  EXPECT_EQ(Score(*engine, score)->sequences[0].senior_logprobs,
            Score(*plain, score)->sequences[0].senior_logprobs);
  PromptRequest request = RequestOf({});
  request.prompt_token_ids[2] = 61;
  EXPECT_EQ(FieldPath(engine->Validate(request)), "prompt_token_ids[2]");
  const absl::Status status = Score(*engine, {.sequences = {{{3, 61}, 1}}}).status();
  EXPECT_EQ(FieldPath(status), "sequences[0].token_ids[1]");
}

TEST_F(EngineTest, WeightsOfAModelWithOtherTokenIdsAreRefused) {
  TemporaryFolder folder;
  EngineOptions padded = Options();
  padded.senior.model = folder / "senior";
  WritePaddedModel(Senior(), padded.senior.model, 70);
  const auto engine = Create(padded);
  std::vector<std::byte> stream;
  // Loaded without regard to the tokenizer: 70 token ids.
  const WeightManifest manifest = ManifestOf(**Model::Load(padded.senior.model), 3, stream);
  const absl::Status status = engine->weights().Begin("u", manifest, false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(status), "VOCABULARY_MISMATCH");
  EXPECT_EQ(FieldPath(status), "manifest.num_token_ids");
}

TEST_F(EngineTest, InfoTellsBoundariesAndModels) {
  const EngineInfo info = Create()->Info();
  EXPECT_EQ(info.senior.vocab_size, 61);
  EXPECT_EQ(info.senior.max_model_len, 128);
  ASSERT_TRUE(info.junior.has_value());
  EXPECT_THAT(info.sentence_boundary_token_ids, ::testing::ElementsAre(8, 16, 24, 32, 40, 48, 56));
  EXPECT_EQ(info.word_boundary_token_ids.front(), 3);
  EXPECT_EQ(info.junior_version.size(), 32u);
}

TEST_F(EngineTest, AFullQueueIsRefusedWithARetryHint) {
  EngineOptions options = Options();
  options.max_queue = 4;
  options.max_num_seqs = 1;
  const auto engine = Create(options);
  ASSERT_TRUE(engine->Pause({}).ok());
  PromptRequest request = RequestOf({});
  request.num_samples = 3;
  const auto held = Submit(*engine, {request});
  const absl::Status full =
      engine->Submit({{request, std::make_shared<RecordingListener>(3)}}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  const int64_t hint = RetryAfterMilliseconds(full).value_or(0);
  EXPECT_GE(hint, 100);
  // Nothing ends while the engine is paused.
  while (RetryAfterMilliseconds(
             engine->Submit({{request, std::make_shared<RecordingListener>(3)}}).status())
             .value_or(0) <= hint) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(engine->Resume({}).ok());
  held[0]->Wait();
  EXPECT_EQ(held[0]->finished().size(), 3u);
}

TEST_F(EngineTest, PromptsAndScoresBehindABusyEngineAreCountedAndBounded) {
  EngineOptions options = Options();
  options.max_queue = 4;
  const auto engine = Create(options);
  PromptRequest request = RequestOf({});
  request.stream_tokens = true;
  const auto gate = std::make_shared<Gate>();
  ASSERT_TRUE(engine->Submit({{request, gate}}).ok());
  gate->WaitUntilHeld();

  request.num_samples = 3;
  const auto waiting = Submit(*engine, {request});
  EXPECT_EQ(engine->Stats().sequences_waiting, 3) << "status does not wait for the engine";
  request.num_samples = 2;
  const absl::Status full =
      engine->Submit({{request, std::make_shared<RecordingListener>(2)}}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(full).has_value());

  std::atomic<int> scored = 0;
  const auto done = [&](const absl::StatusOr<ScoreResult>& result) { scored += result.ok(); };
  const ScoreRequest score = {.sequences = {{{3, 4}, 1}}};
  int accepted = 0;
  absl::Status refused;
  while ((refused = engine->Score(score, {}, done)).ok()) ASSERT_LT(++accepted, 1000);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(refused).has_value());

  gate->Open();
  gate->WaitUntilFinished();
  waiting[0]->Wait();
  while (scored < accepted) std::this_thread::yield();
  EXPECT_TRUE(Score(*engine, score).ok()) << "there is room again";
  EXPECT_EQ(engine->Stats().sequences_waiting, 0);
}

// Records the engine's stats at every token.
class PassCounter final : public PromptListener {
 public:
  explicit PassCounter(const Engine& engine) : engine_(engine) {}
  void OnTokens(TokensDelta) override { steps_.push_back(engine_.Stats()); }
  void OnFinished(Trajectory, SampleDrafts) override { finished_.set_value(); }
  void OnFailed(absl::Status status) override { ADD_FAILURE() << status; }
  const std::vector<EngineStats>& WaitForSteps() {
    finished_.get_future().wait();
    return steps_;
  }

 private:
  const Engine& engine_;
  std::vector<EngineStats> steps_;
  std::promise<void> finished_;
};

// A command, such as a commit, runs between two steps: it waits for what one step is at most.
TEST_F(EngineTest, AStepIsOneTokenAndOneSliceOfTheScores) {
  EngineOptions options = Options();
  options.junior.model = "";
  const auto engine = Create(options);
  ScoreRequest largest;
  for (int i = 0; i < 64; ++i) {
    largest.sequences.push_back({std::vector<int32_t>(128, 3 + i % 50), 1});
  }
  std::vector<std::promise<absl::StatusOr<ScoreResult>>> scores(4);
  for (auto& score : scores) {
    ASSERT_TRUE(
        engine
            ->Score(largest, {},
                    [&](absl::StatusOr<ScoreResult> result) { score.set_value(std::move(result)); })
            .ok());
  }
  PromptRequest request = RequestOf({.enabled = false});
  request.stream_tokens = true;
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  const auto counter = std::make_shared<PassCounter>(*engine);
  ASSERT_TRUE(engine->Submit({{request, counter}}).ok());
  const std::vector<EngineStats>& steps = counter->WaitForSteps();
  ASSERT_EQ(steps.size(), 100u);
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].forward_passes_total, steps[i - 1].forward_passes_total + 1);
    EXPECT_EQ(steps[i].score_passes_total, steps[i - 1].score_passes_total + 1);
  }
  for (auto& score : scores) EXPECT_TRUE(score.get_future().get().ok());
}

TEST_F(EngineTest, CancelFreesTheSequencesOfARunningPrompt) {
  const auto engine = Create();
  PromptRequest request = RequestOf({});
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  request.stream_tokens = true;
  request.num_samples = 4;
  std::vector<PromptId> ids;
  const auto listeners = Submit(*engine, {request, RequestOf({}, 9)}, &ids);
  listeners[0]->WaitForTokens(1);
  engine->Cancel({ids[0]});
  listeners[0]->Wait();
  listeners[1]->Wait();
  if (listeners[0]->failure().has_value()) {  // it may have been faster
    EXPECT_EQ(listeners[0]->failure()->code(), absl::StatusCode::kCancelled);
  }
  ASSERT_TRUE(engine->Pause({}).ok());  // a step boundary: the gauges are up to date
  EXPECT_EQ(engine->Stats().sequences_running, 0);
  EXPECT_EQ(engine->Stats().senior_kv_tokens, 0);
  engine->Cancel({ids[0], 12345});
}

TEST_F(EngineTest, PauseHoldsAndResumeGoesOnIdentically) {
  const auto engine = Create();
  PromptRequest request = RequestOf({.selection_strategy = SelectionStrategy::kWord});
  request.stream_tokens = true;
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  const Trajectory expected = RunOne(*engine, request);
  const auto listener = Submit(*engine, {request})[0];
  listener->WaitForTokens(5);
  ASSERT_TRUE(engine->Pause({}).ok());
  EXPECT_TRUE(engine->Stats().paused);
  const size_t seen = listener->deltas().size();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(listener->deltas().size(), seen);
  ASSERT_TRUE(engine->Resume({}).ok());
  listener->Wait();
  EXPECT_EQ(listener->finished().at(0).response_token_ids, expected.response_token_ids);
}

TEST_F(EngineTest, AnExpiredDeadlineFailsAPausedPrompt) {
  const auto engine = Create();
  ASSERT_TRUE(engine->Pause({}).ok());
  PromptRequest request = RequestOf({});
  request.deadline = SteadyTime::Now() + absl::Milliseconds(50);
  const auto listener = Submit(*engine, {request})[0];
  listener->Wait();
  EXPECT_EQ(listener->failure()->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(SteadyTime::Now(), request.deadline);
  while (engine->Stats().sequences_waiting > 0) std::this_thread::yield();
  EXPECT_EQ(engine->Submit({{request, listener}}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  CallScope late;
  late.deadline = SteadyTime::Now() - absl::Seconds(1);
  EXPECT_EQ(Score(*engine, {.sequences = {{{3, 4, 5}, 1}}}, late).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(EngineTest, ShutdownCancelsAndRefuses) {
  const auto engine = Create();
  ASSERT_TRUE(engine->Pause({}).ok());
  const auto listener = Submit(*engine, {RequestOf({})})[0];
  engine->Shutdown();
  EXPECT_EQ(listener->failure()->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(engine->Submit({{RequestOf({}), listener}}).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(Score(*engine, {.sequences = {{{3, 4}, 1}}}).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, CommittedWeightsWriteTheNextTokens) {
  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder.path(), 5);
  const auto replacement = *Model::Load(folder.path());
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(*replacement, 3, stream);

  const auto engine = Create();
  const Trajectory before = RunOne(*engine, RequestOf({.enabled = false}));
  WeightReceiver& weights = engine->weights();
  ASSERT_TRUE(weights.Begin("u", manifest, false).ok());
  ASSERT_TRUE(weights.Append("u", 0, stream).ok());
  EXPECT_EQ(RunOne(*engine, RequestOf({.enabled = false})).response_token_ids,
            before.response_token_ids);
  ASSERT_TRUE(engine->Pause({}).ok());  // a swap does not wait for Resume
  const auto committed = weights.Commit("u", {});
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->version, 3);
  ASSERT_TRUE(engine->Resume({}).ok());

  EngineOptions options = Options();
  options.senior.model = folder.path();
  const auto fresh = Create(options);
  EXPECT_EQ(fresh->weights().Version().digest, manifest.digest);
  const Trajectory expected = RunOne(*fresh, RequestOf({.enabled = false}));
  const Trajectory after = RunOne(*engine, RequestOf({.enabled = false}));
  EXPECT_NE(after.response_token_ids, before.response_token_ids);
  EXPECT_EQ(after.response_token_ids, expected.response_token_ids);
  EXPECT_EQ(after.author_logprobs, expected.author_logprobs);
  EXPECT_EQ(after.senior_versions.front().weights.version, 3);
  EXPECT_EQ(Score(*engine, {.sequences = {{{3, 4}, 1}}})->weights.version, 3);
}

// Sends a stream to its end; nothing is committed.
void Stage(Engine& engine, const WeightManifest& manifest, const std::vector<std::byte>& stream) {
  ASSERT_TRUE(engine.weights().Begin("u", manifest, false).ok());
  ASSERT_TRUE(engine.weights().Append("u", 0, stream).ok());
}

// Appends a speculator to the stream of its model's update.
void AddSpeculator(const speculator::Speculator& speculator, WeightManifest& manifest,
                   std::vector<std::byte>& stream) {
  for (const auto& [name, value] : speculator::WeightsToSend(speculator)) {
    manifest.tensors.push_back({.name = name, .shape = value.sizes().vec()});
    const size_t begin = stream.size();
    stream.resize(begin + value.nbytes());
    std::memcpy(stream.data() + begin, value.const_data_ptr(), value.nbytes());
  }
  manifest.total_bytes = manifest.chunk_bytes = static_cast<int64_t>(stream.size());
  manifest.components = {speculator::ManifestOf(speculator)};
}

// Returns the response that drafts of heads verified, and their numbers.
std::pair<Trajectory, DraftCounts> RunWithHeads(Engine& engine) {
  PromptRequest request = RequestOf({.enabled = false});
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  request.speculative.method = SpeculativeMethod::kHeads;
  const auto listener = Submit(engine, {request})[0];
  listener->Wait();
  return {listener->finished().at(0), listener->drafts().at(0).counts};
}

TEST_F(EngineTest, ASpeculatorIsReplacedWithItsSenior) {
  TemporaryFolder folder;
  const std::string old_heads = folder.path() + "/old", new_heads = folder.path() + "/new";
  const std::string replacement = folder.path() + "/senior";
  WriteTinyModelAndTokenizer(replacement, 5);
  const auto model = *Model::Load(replacement);
  // Few random heads ever draft a token that this senior writes: these do.
  const auto heads = RandomSpeculator(*model, 3, "mlp", /*seed=*/14);
  ASSERT_TRUE(speculator::SaveSpeculator(*RandomSpeculator(*model, 3), old_heads).ok());
  ASSERT_TRUE(speculator::SaveSpeculator(*heads, new_heads).ok());
  std::vector<std::byte> stream;
  WeightManifest manifest = ManifestOf(*model, 3, stream);
  const std::string digest = manifest.digest;
  AddSpeculator(*heads, manifest, stream);

  EngineOptions options = Options();
  options.senior_speculator = old_heads;
  const auto engine = Create(options);
  RunWithHeads(*engine);
  Stage(*engine, manifest, stream);
  EXPECT_EQ(engine->weights().ComponentVersion(kSpeculatorComponent)->version, 0);
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  EXPECT_EQ(engine->weights().Version(), (WeightsVersion{3, digest}));
  EXPECT_EQ(*engine->weights().ComponentVersion(kSpeculatorComponent),
            (WeightsVersion{3, manifest.components[0].digest}));

  // As on a server that is started with both.
  options.senior.model = replacement;
  options.senior_speculator = new_heads;
  const auto fresh = Create(options);
  EXPECT_EQ(fresh->weights().ComponentVersion(kSpeculatorComponent)->digest,
            manifest.components[0].digest);
  options.senior_speculator = old_heads;
  const auto behind = Create(options);
  const auto [response, drafts] = RunWithHeads(*engine);
  const auto [expected, expected_drafts] = RunWithHeads(*fresh);
  EXPECT_EQ(response.response_token_ids, expected.response_token_ids);
  EXPECT_EQ(response.author_logprobs, expected.author_logprobs);
  EXPECT_GT(drafts.accepted, 0);
  EXPECT_EQ(drafts, expected_drafts);
  EXPECT_NE(drafts, RunWithHeads(*behind).second) << "other heads draft otherwise";
}

TEST_F(EngineTest, HeadsOfTheServedSeniorComeAlone) {
  TemporaryFolder folder;
  const auto model = *Model::Load(Senior());
  const auto heads = RandomSpeculator(*model, 3, "mlp", /*seed=*/8);
  EngineOptions options = Options();
  options.senior_speculator = folder.path() + "/heads";
  ASSERT_TRUE(
      speculator::SaveSpeculator(*RandomSpeculator(*model, 3), options.senior_speculator).ok());
  const auto engine = Create(options);
  const Trajectory before = RunWithHeads(*engine).first;
  const WeightsVersion served = engine->weights().Version();
  WeightManifest manifest;
  manifest.version = 3;
  manifest.digest = served.digest;
  manifest.num_token_ids = engine->Info().senior.num_token_ids;
  std::vector<std::byte> stream;
  AddSpeculator(*heads, manifest, stream);
  Stage(*engine, manifest, stream);
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  EXPECT_EQ(engine->weights().Version(), (WeightsVersion{3, served.digest}));
  EXPECT_EQ(*engine->weights().ComponentVersion(kSpeculatorComponent),
            (WeightsVersion{3, manifest.components[0].digest}));
  const Trajectory after = RunWithHeads(*engine).first;
  EXPECT_EQ(after.author_logprobs, before.author_logprobs);
  EXPECT_EQ(after.senior_versions.front().weights.version, 3);
}

TEST_F(EngineTest, AnUpdateWithoutASpeculatorLeavesIt) {
  TemporaryFolder folder;
  const auto model = *Model::Load(Senior());
  const std::string heads = folder.path() + "/heads";
  ASSERT_TRUE(speculator::SaveSpeculator(*RandomSpeculator(*model, 3), heads).ok());
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(*model, 3, stream);
  EngineOptions options = Options();
  options.senior_speculator = heads;
  const auto engine = Create(options);
  const auto [before, drafts] = RunWithHeads(*engine);
  Stage(*engine, manifest, stream);
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  EXPECT_EQ(engine->weights().Version().version, 3);
  EXPECT_EQ(engine->weights().ComponentVersion(kSpeculatorComponent)->version, 0);
  const auto [after, same_drafts] = RunWithHeads(*engine);
  EXPECT_EQ(after.author_logprobs, before.author_logprobs);
  EXPECT_EQ(same_drafts, drafts);
  EXPECT_EQ(Create()->weights().ComponentVersion(kSpeculatorComponent), std::nullopt);
}

// Writes slowly until something has happened, so that it happens in the middle of the response.
class SlowListener final : public PromptListener {
 public:
  explicit SlowListener(std::shared_future<void> happened) : happened_(std::move(happened)) {}
  void OnTokens(TokensDelta delta) override {
    if (delta.offset == 1) arrived_.set_value();
    if (delta.offset >= 1) happened_.wait_for(std::chrono::milliseconds(100));
  }
  void OnFinished(Trajectory trajectory, SampleDrafts) override {
    finished_.set_value(std::move(trajectory));
  }
  void OnFailed(absl::Status status) override { ADD_FAILURE() << status; }

  void WaitForTwoTokens() { arrived_.get_future().wait(); }
  Trajectory WaitUntilFinished() { return finished_.get_future().get(); }

 private:
  const std::shared_future<void> happened_;
  std::promise<void> arrived_;
  std::promise<Trajectory> finished_;
};

// The lanes' formats, and dense tensors.
TEST_F(EngineTest, WeightsChangeBetweenTwoPassesOfAResponse) {
  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder.path(), 5);
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(**Model::Load(folder.path()), 3, stream);
  for (const std::string format : {"float32", "bfloat16", "int8", "aten"}) {
    SCOPED_TRACE(format);
    EngineOptions options = Options();
    if (format == "bfloat16") options.senior.dtype = DType::kBFloat16;
    if (format == "int8") options.senior.quantization = Quantization::kInt8;
    if (format == "aten") options.compute.kernels = "aten";
    const auto engine = Create(options);
    PromptRequest request = RequestOf({.prob_senior = 1.0}, 3);
    request.sampling.max_tokens = 100;
    request.sampling.ignore_eos = true;
    request.stream_tokens = true;
    std::promise<void> committed;
    const auto listener = std::make_shared<SlowListener>(committed.get_future().share());
    ASSERT_TRUE(engine->Submit({{request, listener}}).ok());
    listener->WaitForTwoTokens();
    Stage(*engine, manifest, stream);
    const absl::Status status = engine->weights().Commit("u", {}).status();
    committed.set_value();
    EXPECT_TRUE(status.ok()) << status;
    const Trajectory t = listener->WaitUntilFinished();
    ASSERT_EQ(t.senior_versions.size(), 2u);
    EXPECT_EQ(t.senior_versions[0].weights.version, 0);
    EXPECT_EQ(t.senior_versions[1].weights.version, 3);

    // Each token has the log-prob of its weights after all tokens before it.
    ScoreSequence sequence = {
        .token_ids = t.prompt_token_ids,
        .first_scored_token = static_cast<int64_t>(t.prompt_token_ids.size())};
    sequence.token_ids.insert(sequence.token_ids.end(), t.response_token_ids.begin(),
                              t.response_token_ids.end());
    const auto scores = [&](const std::string& model) {
      EngineOptions alone = options;
      alone.senior.model = model;
      return Score(*Create(alone), {.sequences = {sequence}})->sequences[0].senior_logprobs;
    };
    std::vector<float> expected = scores(Senior());
    const std::vector<float> rest = scores(folder.path());
    const int64_t count = t.senior_versions[0].count;
    std::copy(rest.begin() + count, rest.end(), expected.begin() + count);
    if (format == "aten") {
      ExpectNear(t.author_logprobs, expected, 1e-4f);
    } else {
      EXPECT_EQ(t.author_logprobs, expected);
    }
  }
}

// A commit is refused while the engine thread stands still: it takes no part in the checks, which
// the packing thread makes tensor by tensor.
TEST_F(EngineTest, ABadTensorIsFoundWithoutTheEngineThreadAndLeavesNothing) {
  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder.path(), 1, {{"tie_word_embeddings", true}});
  const auto model = *Model::Load(folder.path());
  std::vector<std::byte> stream;
  WeightManifest manifest = ManifestOf(*model, 3, stream);
  // The head differs in its last value from the embedding, the stream's first tensor, and the other
  // tensors from those that serve.
  const WeightSpec& embedding = manifest.tensors.front();
  const int64_t bytes = embedding.bytes();
  WeightSpec head = embedding;
  head.name = kLmHeadName;
  for (auto& byte : stream) byte ^= std::byte{1};
  std::vector<std::byte> values(stream.begin(), stream.begin() + bytes);
  values.back() ^= std::byte{1};
  stream.insert(stream.begin() + bytes, values.begin(), values.end());
  manifest.tensors.insert(manifest.tensors.begin() + 1, head);
  manifest.total_bytes = manifest.chunk_bytes = static_cast<int64_t>(stream.size());
  manifest.digest = StreamDigest(manifest.tensors, stream);

  EngineOptions options = Options();
  options.senior.model = folder.path();
  const auto engine = Create(options);
  const Trajectory before = RunOne(*engine, RequestOf({}));
  PromptRequest request = RequestOf({});
  request.stream_tokens = true;
  const auto gate = std::make_shared<Gate>();
  ASSERT_TRUE(engine->Submit({{request, gate}}).ok());
  gate->WaitUntilHeld();
  Stage(*engine, manifest, stream);
  const absl::Status refused = engine->weights().Commit("u", {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(kLmHeadName));
  EXPECT_EQ(engine->weights().OpenUpdateId(), "");
  gate->Open();
  EXPECT_EQ(gate->WaitUntilFinished().senior_versions.size(), 1u);
  EXPECT_EQ(engine->weights().Version().version, 0);
  EXPECT_EQ(RunOne(*engine, RequestOf({})).author_logprobs, before.author_logprobs);
}

TEST_F(EngineTest, DamagedWeightsLeaveTheOldOnesInForce) {
  const auto model = *Model::Load(Senior());
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(*model, 1, stream);
  stream[100] ^= std::byte{1};
  const auto engine = Create();
  const Trajectory before = RunOne(*engine, RequestOf({}));
  ASSERT_TRUE(engine->weights().Begin("u", manifest, false).ok());
  ASSERT_TRUE(engine->weights().Append("u", 0, stream).ok());
  EXPECT_EQ(engine->weights().Commit("u", {}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(engine->weights().Version().version, 0);
  EXPECT_EQ(RunOne(*engine, RequestOf({})).author_logprobs, before.author_logprobs);
}

TEST_F(EngineTest, NotANumberWeightsFailThePromptAndNotTheEngine) {
  const auto model = *Model::Load(Senior());
  model->Parameter("model.norm.weight").fill_(NAN);
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(*model, 1, stream);
  EngineOptions options = Options();
  options.allow_not_finite_weights = true;
  const auto engine = Create(options);
  ASSERT_TRUE(engine->weights().Begin("u", manifest, false).ok());
  ASSERT_TRUE(engine->weights().Append("u", 0, stream).ok());
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  const auto broken = Submit(*engine, {RequestOf({.prob_senior = 1.0})})[0];
  broken->Wait();
  EXPECT_EQ(broken->failure()->code(), absl::StatusCode::kInternal);
  EXPECT_EQ(RunOne(*engine, RequestOf({.prob_senior = 0.0})).finish_reason, FinishReason::kLength);
}

TEST_F(EngineTest, TheJuniorsEndOfSequenceEndsAResponseToo) {
  PromptRequest request = RequestOf({.prob_senior = 1.0});
  request.sampling.ignore_eos = true;
  const Trajectory whole = RunOne(*Create(), request);
  const int32_t stop = whole.response_token_ids[9];
  const auto first =
      std::find(whole.response_token_ids.begin(), whole.response_token_ids.end(), stop);

  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(
      folder.path(), 2, {{"num_hidden_layers", 1}, {"hidden_size", 24}, {"eos_token_id", stop}});
  EngineOptions options = Options();
  options.junior.model = folder.path();
  const auto engine = Create(options);
  EXPECT_THAT(engine->Info().junior->eos_token_ids, ::testing::ElementsAre(stop));
  request.sampling.ignore_eos = false;
  const Trajectory stopped = RunOne(*engine, request);
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.response_token_ids,
            std::vector<int32_t>(whole.response_token_ids.begin(), first + 1));
}

TEST_F(EngineTest, AStopTextEndsAResponse) {
  const Vocabulary vocabulary = Vocabulary::Parse(TinyTokenizerJson().dump()).value();
  PromptRequest request = RequestOf({.prob_senior = 0.5});
  request.sampling.ignore_eos = true;
  const std::vector<int32_t> whole = RunOne(*Create(), request).response_token_ids;
  const auto text_of = [&](size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) {
      if (!vocabulary.is_special(whole[i])) text += vocabulary.Decode(whole[i]);
    }
    return text;
  };
  const std::string stop = text_of(8).substr(text_of(6).size() - 1);
  ASSERT_GT(stop.size(), 2u);
  size_t length = 1;
  while (text_of(length).find(stop) == std::string::npos) ++length;
  request.sampling.stop = {stop};
  const Trajectory stopped = RunOne(*Create(), request);
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.response_token_ids,
            std::vector<int32_t>(whole.begin(), whole.begin() + length));
}

// Throws where no error is expected.
class ThrowingListener final : public PromptListener {
 public:
  void OnTokens(TokensDelta) override { throw std::runtime_error("a listener broke"); }
  void OnFinished(Trajectory, SampleDrafts) override {}
  void OnFailed(absl::Status status) override { failed_.set_value(std::move(status)); }
  absl::Status WaitForFailure() { return failed_.get_future().get(); }

 private:
  std::promise<absl::Status> failed_;
};

TEST_F(EngineTest, AnExceptionInAStepFailsItsPromptsAndNotTheEngine) {
  const auto engine = Create();
  PromptRequest request = RequestOf({});
  request.num_samples = 5;
  request.stream_tokens = true;
  const auto listener = std::make_shared<ThrowingListener>();
  ASSERT_TRUE(engine->Submit({{request, listener}}).ok());
  EXPECT_EQ(listener->WaitForFailure().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(RunOne(*engine, RequestOf({})).author_logprobs,
            RunOne(*Create(), RequestOf({})).author_logprobs);
  // A listener hears before the numbers of its step are published.
  ASSERT_TRUE(engine->Pause({}).ok());
  EXPECT_EQ(engine->Stats().senior_kv_tokens, 0);
}

// Throws when it hears of a failure.
class DeafListener : public PromptListener {
 public:
  void OnTokens(TokensDelta) override { throw std::runtime_error("no tokens please"); }
  void OnFinished(Trajectory, SampleDrafts) override {}
  void OnFailed(absl::Status) override { throw std::runtime_error("no failures please"); }
};

TEST_F(EngineTest, AListenerThatThrowsWhenAllFailKeepsNobodyFromHearing) {
  auto engine = Create();
  PromptRequest request = RequestOf({});
  request.stream_tokens = true;
  const auto deaf = std::make_shared<DeafListener>();
  // A step fails: the one that is told first throws once more.
  const auto listener = std::make_shared<RecordingListener>(1);
  ASSERT_TRUE(engine->Submit({{request, deaf}, {RequestOf({}), listener}}).ok());
  listener->Wait();
  EXPECT_EQ(listener->failure()->code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine->Pause({}).ok());
  EXPECT_EQ(engine->Stats().senior_kv_tokens, 0);

  // The engine ends.
  const auto last = std::make_shared<RecordingListener>(1);
  ASSERT_TRUE(engine->Submit({{request, deaf}, {RequestOf({}), last}}).ok());
  engine->Shutdown();
  EXPECT_EQ(last->failure()->code(), absl::StatusCode::kCancelled);
}

TEST(TorchRunnerTest, WhatLibtorchRefusesIsAStatus) {
  TemporaryFolder folder;
  WriteTinyModel(folder.path(), 1);
  TorchRunner runner(*Model::Load(folder.path()), /*num_blocks=*/2, DType::kFloat32);
  const BlockCopy copy = {.from = 0, .to = 2};
  PassResults results;
  EXPECT_EQ(runner.Run({.copies = {&copy, 1}, .sequences = {}, .rows = {}}, results).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace tandem::rollout
