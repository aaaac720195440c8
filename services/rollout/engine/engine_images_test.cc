// Images in prompts and scores, through the public interface: what a sequence looks like depends on
// its tokens and pixels alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/model/testing/image_batches.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/recording_listener.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"

namespace tandem::rollout {
namespace {

constexpr int32_t kImage = 57, kVideo = 58;  // of TinyConfigJson

// The families of senior and junior.
class EngineImagesTest : public ::testing::TestWithParam<std::pair<const char*, const char*>> {
 protected:
  EngineImagesTest() {
    WriteTinyModelAndTokenizer(folder_ / "senior", 1, nlohmann::json::object(), GetParam().first);
    WriteTinyModelAndTokenizer(folder_ / "junior", 2, nlohmann::json::object(), GetParam().second);
  }

  EngineOptions Options() const {
    EngineOptions options = TinyOptions(folder_.path());
    options.senior.max_model_len = options.junior.max_model_len = 192;
    return options;
  }
  static std::unique_ptr<Engine> Create(const EngineOptions& options) {
    auto engine = CreateEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  TemporaryFolder folder_;
};

// Adds an image or a video to the end of the prompt.
void AddImage(PromptRequest& request, const VisionGrid& grid, uint64_t seed, bool is_video) {
  const VisionConfig vision = *TinyConfig("qwen2_vl").vision;
  const std::string digest = absl::StrCat("seed ", seed);
  request.blobs[digest] = RandomPixels(vision, grid, seed);
  request.vision_inputs.push_back({.is_video = is_video,
                                   .digest = digest,
                                   .grid_t = grid.frames,
                                   .grid_h = grid.height,
                                   .grid_w = grid.width,
                                   .seconds_per_grid = 0.75});
  request.prompt_token_ids.insert(request.prompt_token_ids.end(),
                                  static_cast<size_t>(vision.Rows(grid)),
                                  is_video ? kVideo : kImage);
}

// A prompt of text, an image of 80 tokens (more than a block), text, a video, and text.
PromptRequest ImagePrompt(uint64_t image_seed, bool tandem = true) {
  PromptRequest request = RequestOf({.enabled = tandem}, 7);
  request.prompt_token_ids = {5, 6, 7};
  AddImage(request, {1, 16, 20}, image_seed, /*is_video=*/false);
  request.prompt_token_ids.insert(request.prompt_token_ids.end(), {8, 9});
  AddImage(request, {3, 4, 2}, 5, /*is_video=*/true);
  // The response begins the third block.
  request.prompt_token_ids.insert(request.prompt_token_ids.end(), 24, 10);
  request.sampling.ignore_eos = true;
  request.return_other_logprobs = tandem;
  return request;
}

PromptRequest TextPrompt(uint64_t seed) { return RequestOf({.enabled = true}, seed); }

void ExpectSame(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.response_token_ids, b.response_token_ids);
  EXPECT_EQ(a.author_logprobs, b.author_logprobs);
  EXPECT_EQ(a.other_logprobs, b.other_logprobs);
}

// Returns the trajectories of one batch, prompt after prompt.
std::vector<Trajectory> RunAll(Engine& engine, const std::vector<PromptRequest>& requests) {
  std::vector<Trajectory> all;
  for (const auto& listener : Submit(engine, requests)) {
    listener->Wait();
    EXPECT_EQ(listener->failure(), std::nullopt);
    for (const auto& [index, trajectory] : listener->finished()) all.push_back(trajectory);
  }
  std::ranges::stable_sort(all, {}, [](const Trajectory& t) {
    return std::tuple(t.prompt_token_ids, t.vision_inputs.empty() ? "" : t.vision_inputs[0].digest,
                      t.sample_index);
  });
  return all;
}

TEST_P(EngineImagesTest, BatchingChunkingAndPreemptionDoNotMatter) {
  PromptRequest samples = ImagePrompt(1);
  samples.num_samples = 3;
  const std::vector<PromptRequest> requests = {samples, ImagePrompt(2), TextPrompt(3)};
  const std::vector<Trajectory> together = RunAll(*Create(Options()), requests);
  ASSERT_EQ(together.size(), 5);
  EXPECT_NE(together[0].response_token_ids, together[3].response_token_ids)
      << "the same tokens with other pixels";

  EngineOptions alone = Options();
  alone.max_num_seqs = 1;
  alone.max_batched_tokens = 7;  // images are consumed in pieces
  const std::vector<Trajectory> chunked = RunAll(*Create(alone), requests);
  EngineOptions little = Options();    // of cache: sequences are preempted
  little.kv_cache_bytes = 7 * 40'960;  // of a block in both lanes: 4 of them for generation
  const auto preempting = Create(little);
  const std::vector<Trajectory> replayed = RunAll(*preempting, requests);
  EXPECT_GT(preempting->Stats().preemptions_total, 0);
  for (size_t i = 0; i < together.size(); ++i) {
    ExpectSame(chunked[i], together[i]);
    ExpectSame(replayed[i], together[i]);
    EXPECT_EQ(together[i].vision_inputs.size(), i < 4 ? 2 : 0);
  }
}

TEST_P(EngineImagesTest, ScoresHaveTheBitsOfTheResponses) {
  const auto engine = Create(Options());
  const PromptRequest prompt = ImagePrompt(1);
  const Trajectory t = RunOne(*engine, prompt);
  ScoreRequest request = {.sequences = {}, .senior = true, .junior = true, .blobs = prompt.blobs};
  ScoreSequence sequence = {.token_ids = t.prompt_token_ids,
                            .first_scored_token = static_cast<int32_t>(t.prompt_token_ids.size()),
                            .vision_inputs = t.vision_inputs};
  sequence.token_ids.insert(sequence.token_ids.end(), t.response_token_ids.begin(),
                            t.response_token_ids.end());
  // The same tokens with another image are another sequence, also for the blocks that are shared.
  ScoreSequence other = sequence;
  const PromptRequest other_prompt = ImagePrompt(2);
  other.vision_inputs = other_prompt.vision_inputs;
  request.blobs.insert(other_prompt.blobs.begin(), other_prompt.blobs.end());
  request.sequences = {sequence, other, sequence};
  const absl::StatusOr<ScoreResult> scores = Score(*engine, request);
  ASSERT_TRUE(scores.ok()) << scores.status();
  for (const size_t i : {0, 2}) {
    for (size_t r = 0; r < t.response_token_ids.size(); ++r) {
      const bool senior = t.authorship_mask[r] == Author::kSenior;
      EXPECT_EQ(scores->sequences[i].senior_logprobs[r],
                senior ? t.author_logprobs[r] : t.other_logprobs[r]);
      EXPECT_EQ(scores->sequences[i].junior_logprobs[r],
                senior ? t.other_logprobs[r] : t.author_logprobs[r]);
    }
  }
  EXPECT_NE(scores->sequences[1].senior_logprobs, scores->sequences[0].senior_logprobs);
}

// A turn of an environment shows an image. What the models write behind it has the bits of scores,
// whether the image stands in a turn or in the prompt, and in an engine that reads it in pieces.
TEST_P(EngineImagesTest, AnImageOfATurnIsReadAsOneOfThePrompt) {
  const auto engine = Create(Options());
  PromptRequest request = ImagePrompt(1);
  const Trajectory turn = RunOne(*engine, request);
  request.response_token_ids = turn.response_token_ids;
  request.response_authors = turn.authorship_mask;
  PromptRequest shown;
  AddImage(shown, {1, 8, 8}, /*seed=*/3, /*is_video=*/false);
  VisionReference image = shown.vision_inputs[0];
  image.first_token =
      std::ssize(request.prompt_token_ids) + std::ssize(turn.response_token_ids) + 1;
  request.vision_inputs.push_back(image);
  request.blobs.insert(shown.blobs.begin(), shown.blobs.end());
  std::vector<int32_t> said = {11};
  said.insert(said.end(), shown.prompt_token_ids.begin(), shown.prompt_token_ids.end());
  said.push_back(12);
  request.response_token_ids.insert(request.response_token_ids.end(), said.begin(), said.end());
  request.response_authors.resize(request.response_token_ids.size(), Author::kEnvironment);
  const Trajectory next = RunOne(*engine, request);
  EXPECT_EQ(next.vision_inputs, request.vision_inputs);

  EngineOptions pieces = Options();
  pieces.max_batched_tokens = 7;
  ExpectSame(RunOne(*Create(pieces), request), next);

  ScoreSequence in_turn = {.token_ids = request.prompt_token_ids,
                           .first_scored_token = std::ssize(request.prompt_token_ids),
                           .vision_inputs = request.vision_inputs};
  in_turn.token_ids.insert(in_turn.token_ids.end(), request.response_token_ids.begin(),
                           request.response_token_ids.end());
  ScoreSequence in_prompt = in_turn;
  in_prompt.first_scored_token = std::ssize(in_turn.token_ids);
  in_prompt.vision_inputs.back().first_token.reset();
  for (ScoreSequence* sequence : {&in_turn, &in_prompt}) {
    sequence->token_ids.insert(sequence->token_ids.end(), next.response_token_ids.begin(),
                               next.response_token_ids.end());
  }
  const absl::StatusOr<ScoreResult> scores = Score(
      *engine,
      {.sequences = {in_turn, in_prompt}, .senior = true, .junior = true, .blobs = request.blobs});
  ASSERT_TRUE(scores.ok()) << scores.status();
  for (size_t r = 0; r < next.response_token_ids.size(); ++r) {
    const bool senior = next.authorship_mask[r] == Author::kSenior;
    for (const auto& one : scores->sequences) {
      const size_t at = one.senior_logprobs.size() - next.response_token_ids.size() + r;
      EXPECT_EQ(one.senior_logprobs[at], senior ? next.author_logprobs[r] : next.other_logprobs[r]);
      EXPECT_EQ(one.junior_logprobs[at], senior ? next.other_logprobs[r] : next.author_logprobs[r]);
    }
  }

  // Without the image, the environment's token is not text; a model's would be.
  request.vision_inputs.pop_back();
  const absl::Status status = engine->Submit({{request, nullptr}}).status();
  EXPECT_EQ(FieldPath(status).value_or(""), absl::StrCat("prompts[0].response.token_ids[",
                                                         turn.response_token_ids.size() + 1, "]"));
}

TEST_P(EngineImagesTest, NewWeightsComputeImagesAgain) {
  const auto engine = Create(Options());
  const PromptRequest prompt = ImagePrompt(1, /*tandem=*/false);
  const Trajectory before = RunOne(*engine, prompt);
  const auto model = TinyModel(GetParam().first, {}, {}, /*seed=*/9);
  std::vector<std::byte> stream;
  const WeightManifest manifest = ManifestOf(*model, 1, stream);
  ASSERT_TRUE(engine->weights().Begin("u", manifest, false).ok());
  ASSERT_TRUE(engine->weights().Append("u", 0, stream).ok());
  ASSERT_TRUE(engine->weights().Commit("u", {}).ok());
  const Trajectory after = RunOne(*engine, prompt);
  EXPECT_NE(after.author_logprobs, before.author_logprobs);

  ASSERT_TRUE(model->Save(folder_ / "new").ok());
  std::ofstream(folder_ / "new/tokenizer.json") << TinyTokenizerJson().dump();
  EngineOptions fresh = Options();
  fresh.senior.model = folder_ / "new";
  ExpectSame(RunOne(*Create(fresh), prompt), after);
}

INSTANTIATE_TEST_SUITE_P(Families, EngineImagesTest,
                         ::testing::Values(std::pair("qwen2_vl", "qwen2_vl"),
                                           std::pair("qwen2_5_vl", "qwen2_vl")),
                         [](const auto& info) { return std::string(info.param.first); });

TEST(EngineImagesJuniorTest, ATextJuniorRefusesImagesUnlessTandemIsOff) {
  TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder / "senior", 1, nlohmann::json::object(), "qwen2_vl");
  WriteTinyModelAndTokenizer(folder / "junior", 2);
  auto created = CreateEngine(TinyOptions(folder.path()));
  ASSERT_TRUE(created.ok()) << created.status();
  Engine& engine = **created;
  const absl::Status refused = engine.Validate(ImagePrompt(1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasReason(refused, reason::kNoImages));
  EXPECT_EQ(RunOne(engine, ImagePrompt(1, /*tandem=*/false)).vision_inputs.size(), 2);
}

}  // namespace
}  // namespace tandem::rollout
