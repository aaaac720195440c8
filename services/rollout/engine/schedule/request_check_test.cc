#include "services/rollout/engine/schedule/request_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "common/base/errors/error.h"

namespace tandem::rollout {
namespace {

using ::testing::HasSubstr;

const RequestLimits kLimits = {.num_token_ids = 50,
                               .max_model_len = 10,
                               .junior_max_model_len = 6,
                               .max_samples = 4,
                               .has_junior = true};

PromptRequest PromptOf(size_t length, bool tandem) {
  PromptRequest request;
  request.prompt_token_ids.assign(length, 3);
  request.sampling.max_tokens = 100;
  request.tandem.enabled = tandem;
  return request;
}

constexpr int32_t kImage = 30;

VisionConfig Vision() {
  return {.in_channels = 1,
          .patch_size = 1,
          .temporal_patch_size = 1,
          .spatial_merge_size = 2,
          .image_token_id = kImage,
          .video_token_id = 31};
}

// A prompt of 5 tokens, one of which stands for an image of 4 patches of one value.
PromptRequest PromptWithImage(bool tandem) {
  PromptRequest prompt = PromptOf(5, tandem);
  prompt.prompt_token_ids[2] = kImage;
  prompt.vision_inputs = {{.digest = "d", .grid_t = 1, .grid_h = 2, .grid_w = 2}};
  prompt.blobs["d"] = std::make_shared<const std::string>(16, 'x');
  return prompt;
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code, const char* field) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(FieldPath(status), field);
}

TEST(CheckPromptTest, ImagesMustFitThePrompt) {
  RequestLimits limits = kLimits;
  limits.vision[0] = Vision();
  EXPECT_TRUE(CheckPrompt(PromptWithImage(/*tandem=*/false), limits).ok());
  PromptRequest prompt = PromptWithImage(/*tandem=*/false);
  prompt.prompt_token_ids[2] = 3;
  ExpectRefused(CheckPrompt(prompt, limits), absl::StatusCode::kInvalidArgument,
                "vision_inputs[0]");
  prompt = PromptWithImage(/*tandem=*/false);
  prompt.vision_inputs.clear();
  ExpectRefused(CheckPrompt(prompt, limits), absl::StatusCode::kInvalidArgument, "vision_inputs");
  prompt = PromptWithImage(/*tandem=*/false);
  prompt.blobs["d"] = std::make_shared<const std::string>(12, 'x');
  ExpectRefused(CheckPrompt(prompt, limits), absl::StatusCode::kInvalidArgument,
                "vision_inputs[0].digest");
  limits.vision[0].reset();
  ExpectRefused(CheckPrompt(PromptWithImage(/*tandem=*/false), limits),
                absl::StatusCode::kInvalidArgument, "vision_inputs");
}

TEST(CheckPromptTest, AJuniorMustReadImagesAsTheSeniorDoes) {
  RequestLimits limits = kLimits;
  limits.vision[0] = Vision();
  PromptRequest drafts = PromptWithImage(/*tandem=*/false);
  drafts.speculative.method = SpeculativeMethod::kJunior;
  for (const PromptRequest& request : {PromptWithImage(/*tandem=*/true), drafts}) {
    limits.vision[1].reset();
    const absl::Status status = CheckPrompt(request, limits);
    ExpectRefused(status, absl::StatusCode::kFailedPrecondition, "vision_inputs");
    EXPECT_TRUE(HasReason(status, reason::kNoImages));
    limits.vision[1] = Vision();
    limits.vision[1]->patch_size = 2;
    ExpectRefused(CheckPrompt(request, limits), absl::StatusCode::kFailedPrecondition,
                  "vision_inputs");
    // Its positions may differ.
    limits.vision[1] = Vision();
    limits.vision[1]->tokens_per_second = 2;
    EXPECT_TRUE(CheckPrompt(request, limits).ok());
  }
  limits.vision[1].reset();
  EXPECT_TRUE(CheckPrompt(PromptWithImage(/*tandem=*/false), limits).ok());
}

TEST(CheckScoreTest, ImagesAreBeforeTheScoredTokens) {
  RequestLimits limits = kLimits;
  limits.vision[0] = Vision();
  const PromptRequest prompt = PromptWithImage(/*tandem=*/false);
  const auto score = [&](int32_t first_scored_token, bool with_image) {
    ScoreRequest request = {.sequences = {{.token_ids = prompt.prompt_token_ids,
                                           .first_scored_token = first_scored_token}},
                            .senior = true,
                            .blobs = prompt.blobs};
    if (with_image) request.sequences[0].vision_inputs = prompt.vision_inputs;
    return CheckScore(request, limits);
  };
  EXPECT_TRUE(score(3, true).ok());
  ExpectRefused(score(2, true), absl::StatusCode::kInvalidArgument,
                "sequences[0].vision_inputs[0]");
  ExpectRefused(score(3, false), absl::StatusCode::kInvalidArgument, "sequences[0].vision_inputs");
  EXPECT_TRUE(score(2, false).ok()) << "a response that wrote the token is text";
}

TEST(CheckPromptTest, TheLimitOfTheLanesThatWriteHolds) {
  EXPECT_TRUE(CheckPrompt(PromptOf(9, /*tandem=*/false), kLimits).ok());
  EXPECT_TRUE(CheckPrompt(PromptOf(5, /*tandem=*/true), kLimits).ok());
  absl::Status status = CheckPrompt(PromptOf(10, /*tandem=*/false), kLimits);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldPath(status), "prompt_token_ids");
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 10 (senior.max_model_len"));
  status = CheckPrompt(PromptOf(6, /*tandem=*/true), kLimits);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldPath(status), "prompt_token_ids");
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 6 (junior.max_model_len"));

  RequestLimits long_junior = kLimits;
  long_junior.junior_max_model_len = 20;
  status = CheckPrompt(PromptOf(10, /*tandem=*/true), long_junior);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 10 (senior.max_model_len"));
}

TEST(CheckPromptTest, AResponseEndsAtTheLimit) {
  EXPECT_EQ(LongestResponse(PromptOf(4, /*tandem=*/false), kLimits), 6);
  EXPECT_EQ(LongestResponse(PromptOf(4, /*tandem=*/true), kLimits), 2);
  PromptRequest request = PromptOf(4, /*tandem=*/true);
  request.sampling.max_tokens = 1;
  EXPECT_EQ(LongestResponse(request, kLimits), 1);
}

TEST(CheckPromptTest, LikeliestTokensAreBounded) {
  PromptRequest request = PromptOf(4, /*tandem=*/false);
  RequestLimits limits = kLimits;
  limits.num_token_ids = 1000;
  limits.max_model_len = 100'000;
  request.num_top_logprobs = kMaxTopLogprobs;
  EXPECT_TRUE(CheckPrompt(request, limits).ok());
  request.sampling.max_tokens = 10'000;  // 128 x 10,000 x 8 bytes
  ExpectRefused(CheckPrompt(request, limits), absl::StatusCode::kOutOfRange, "num_top_logprobs");
  request.sampling.max_tokens = 100;
  request.num_top_logprobs = kMaxTopLogprobs + 1;
  ExpectRefused(CheckPrompt(request, limits), absl::StatusCode::kInvalidArgument,
                "num_top_logprobs");
  request.num_top_logprobs = 51;  // beyond the vocabulary of kLimits
  ExpectRefused(CheckPrompt(request, kLimits), absl::StatusCode::kInvalidArgument,
                "num_top_logprobs");
}

TEST(CheckPromptTest, AResponseSoFarMustFitAndBeginWithAModel) {
  PromptRequest request = PromptOf(4, /*tandem=*/false);
  request.response_token_ids = {7, 8, 9};
  request.response_authors = {Author::kSenior, Author::kEnvironment, Author::kJunior};
  EXPECT_TRUE(CheckPrompt(request, kLimits).ok());
  EXPECT_EQ(LongestResponse(request, kLimits), 10 - 4 - 3);
  request.first_sample_index = 5;
  EXPECT_TRUE(CheckPrompt(request, kLimits).ok());

  const auto refused = [&](auto damage, absl::StatusCode code, const char* field) {
    PromptRequest damaged = request;
    damage(damaged);
    ExpectRefused(CheckPrompt(damaged, kLimits), code, field);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOutOfRange = absl::StatusCode::kOutOfRange;
  refused([](auto& r) { r.response_authors.pop_back(); }, kInvalid, "response.authorship_mask");
  refused([](auto& r) { r.response_authors[0] = Author::kEnvironment; }, kInvalid,
          "response.authorship_mask[0]");
  refused([](auto& r) { r.response_token_ids[2] = 50; }, kInvalid, "response.token_ids[2]");
  // The prompt fits, and the response does not: with tandem the junior's limit is 6.
  refused([](auto& r) { r.tandem.enabled = true; }, kOutOfRange, "response.token_ids");
  refused([](auto& r) { r.first_sample_index = ~uint64_t{0}; }, kOutOfRange, "first_sample_index");

  RequestLimits sees = kLimits;
  sees.vision[0] = Vision();
  request.response_token_ids = {kImage, 8, 9};
  EXPECT_TRUE(CheckPrompt(request, sees).ok()) << "a model's text";
  request.response_token_ids = {7, kImage, 9};
  ExpectRefused(CheckPrompt(request, sees), kInvalid, "response.token_ids[1]");
  request.vision_inputs = PromptWithImage(/*tandem=*/false).vision_inputs;
  request.blobs = PromptWithImage(/*tandem=*/false).blobs;
  request.vision_inputs[0].first_token = 5;
  EXPECT_TRUE(CheckPrompt(request, sees).ok()) << "an image of the environment";
}

TEST(CheckPromptTest, DraftsOfTheJuniorNeedItsLane) {
  PromptRequest request = PromptOf(6, /*tandem=*/false);
  EXPECT_EQ(LongestResponse(request, kLimits), 4);
  request.speculative.method = SpeculativeMethod::kJunior;
  EXPECT_EQ(FieldPath(CheckPrompt(request, kLimits)), "prompt_token_ids");
  request.prompt_token_ids.resize(4);
  EXPECT_TRUE(CheckPrompt(request, kLimits).ok());
  EXPECT_EQ(LongestResponse(request, kLimits), 2);
  RequestLimits alone = kLimits;
  alone.has_junior = false;
  const absl::Status status = CheckPrompt(request, alone);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(status), "speculative.method");
}

TEST(CheckPromptTest, ARecordOfRoutingNeedsExpertsAndRoom) {
  PromptRequest request = PromptOf(4, /*tandem=*/false);
  request.return_routed_experts = true;
  RequestLimits limits = kLimits;
  const auto expect = [&](absl::StatusCode code) {
    const absl::Status status = CheckPrompt(request, limits);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), "return_routed_experts");
  };
  expect(absl::StatusCode::kInvalidArgument);
  limits.routing_bytes_per_token = kMaxRoutingBytes / 9;  // 4 + 6 tokens, all but the last
  EXPECT_TRUE(CheckPrompt(request, limits).ok());
  ++limits.routing_bytes_per_token;
  expect(absl::StatusCode::kOutOfRange);
  request.sampling.max_tokens = 5;
  EXPECT_TRUE(CheckPrompt(request, limits).ok());
  limits.senior_has_window = true;
  expect(absl::StatusCode::kUnimplemented);
}

TEST(CheckPromptTest, StopTextsNeedAVocabulary) {
  RequestLimits limits = kLimits;
  PromptRequest prompt = PromptOf(5, /*tandem=*/false);
  prompt.sampling.stop = {"</answer>"};
  ExpectRefused(CheckPrompt(prompt, limits), absl::StatusCode::kFailedPrecondition,
                "sampling.stop");
  limits.has_vocabulary = true;
  EXPECT_TRUE(CheckPrompt(prompt, limits).ok());
  prompt.sampling.stop.emplace_back();
  ExpectRefused(CheckPrompt(prompt, limits), absl::StatusCode::kInvalidArgument,
                "sampling.stop[1]");
}

TEST(CheckPromptTest, SpeculativeDecodingFailsClosed) {
  const struct {
    SpeculativeParams params;
    const char* field;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  } kBad[] = {
      {{.method = SpeculativeMethod::kHeads}, "method", absl::StatusCode::kFailedPrecondition},
      {{.num_speculative_tokens = 0}, "num_speculative_tokens"},
      {{.num_speculative_tokens = 16}, "num_speculative_tokens"},
      {{.prompt_lookup_min = 0}, "prompt_lookup_min"},
      {{.prompt_lookup_min = 5}, "prompt_lookup_min"},
      {{.prompt_lookup_max = 17}, "prompt_lookup_max"},
  };
  for (const auto& bad : kBad) {
    PromptRequest request = PromptOf(4, /*tandem=*/false);
    request.speculative = bad.params;  // checked with the method none, too
    const absl::Status status = CheckPrompt(request, kLimits);
    EXPECT_EQ(FieldPath(status), std::string("speculative.") + bad.field);
    EXPECT_EQ(status.code(), bad.code);
  }
  PromptRequest request = PromptOf(4, /*tandem=*/false);
  request.speculative = {.method = SpeculativeMethod::kNgram,
                         .num_speculative_tokens = 15,
                         .acceptance_rule = AcceptanceRule::kRejectionSampling};
  EXPECT_TRUE(CheckPrompt(request, kLimits).ok());
  request.speculative.method = SpeculativeMethod::kHeads;
  RequestLimits limits = kLimits;
  limits.speculator_heads = 3;
  EXPECT_TRUE(CheckPrompt(request, limits).ok()) << "the server takes as many as there are heads";
}

TEST(CheckScoreTest, TheLimitOfTheLanesThatScoreHolds) {
  ScoreRequest request = {.sequences = {{std::vector<int32_t>(10, 3), 1}}};
  EXPECT_TRUE(CheckScore(request, kLimits).ok());
  request.junior = true;
  for (const bool senior : {true, false}) {
    request.senior = senior;
    const absl::Status status = CheckScore(request, kLimits);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
    EXPECT_EQ(FieldPath(status), "sequences[0].token_ids");
    EXPECT_THAT(std::string(status.message()), HasSubstr("at most 6 (junior.max_model_len"));
  }
}

TEST(CheckScoreTest, ErrorsNameTheField) {
  ScoreRequest request;
  RequestLimits limits = kLimits;
  const auto path = [&] { return FieldPath(CheckScore(request, limits)).value_or(""); };
  EXPECT_EQ(path(), "sequences");
  request.sequences = {{{1}, 1}};
  EXPECT_EQ(path(), "sequences[0].token_ids");
  request.sequences = {{{1, 2}, 2}};
  EXPECT_EQ(path(), "sequences[0].first_scored_token");
  request.sequences = {{{1, 2}, 0}};
  EXPECT_EQ(path(), "sequences[0].first_scored_token");
  request.sequences = {{{1, 2}, 1}, {{1, 50}, 1}};
  EXPECT_EQ(path(), "sequences[1].token_ids[1]");
  request.sequences = {{{1, 2}, 1}};
  EXPECT_EQ(path(), "");
  for (const double temperature : {0.0, -1.0, 1e-9, static_cast<double>(NAN)}) {
    request.temperature = temperature;
    EXPECT_EQ(path(), "temperature") << temperature;
  }
  request.temperature = 1.0;
  request.senior = false;
  EXPECT_EQ(path(), "senior");
  request.junior = true;
  EXPECT_EQ(path(), "");
  limits.has_junior = false;
  EXPECT_EQ(path(), "junior");
}

}  // namespace
}  // namespace tandem::rollout
