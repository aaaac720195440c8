#include "services/rollout/engine/schedule/scorer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/tandem_sampler.h"
#include "services/rollout/engine/testing/fake_runner.h"

namespace tandem::rollout {
namespace {

constexpr int32_t kVocab = 40;
constexpr int64_t kPassTokens = 16;
// More than the sequences of a group need, and fewer than all.
constexpr BlockRange kBlocks = {.first = 3, .count = 10};

ScoreRequest Request(int sequences, int length, bool senior = true, bool junior = false) {
  ScoreRequest request = {.sequences = {}, .senior = senior, .junior = junior, .temperature = 0.8};
  for (int i = 0; i < sequences; ++i) {
    ScoreSequence sequence = {.token_ids = {}, .first_scored_token = 1 + i % 3};
    for (int t = 0; t < length + i % 4; ++t) sequence.token_ids.push_back((i * 7 + t * 3) % kVocab);
    request.sequences.push_back(std::move(sequence));
  }
  return request;
}

class ScorerTest : public ::testing::Test {
 protected:
  using Result = std::optional<absl::StatusOr<ScoreResult>>;

  // The result appears when the job has ended.
  std::shared_ptr<Result> Submit(ScoreRequest request, const CallScope& call = {}) {
    auto result = std::make_shared<Result>();
    scorer_.Submit(std::move(request), call, [result](absl::StatusOr<ScoreResult> ended) {
      EXPECT_FALSE(result->has_value()) << "ended twice";
      *result = std::move(ended);
    });
    return result;
  }
  void Finish() {
    for (int steps = 0; scorer_.HasWork(); ++steps) {
      ASSERT_LT(steps, 10000) << "no progress";
      scorer_.Step();
    }
    EXPECT_EQ(scorer_.num_held_blocks(Author::kSenior), 0);
    EXPECT_EQ(scorer_.num_held_blocks(Author::kJunior), 0);
  }
  static void ExpectScores(const FakeRunner& model, const ScoreRequest& request,
                           const ScoreResult& result, std::vector<float> SequenceScores::*field) {
    TandemSampler sampler;
    ASSERT_EQ(result.sequences.size(), request.sequences.size());
    for (size_t i = 0; i < request.sequences.size(); ++i) {
      const ScoreSequence& sequence = request.sequences[i];
      std::vector<float> expected;
      for (size_t t = sequence.first_scored_token; t < sequence.token_ids.size(); ++t) {
        expected.push_back(
            *sampler.TokenLogProb(model.Logits(std::span(sequence.token_ids).first(t)),
                                  request.temperature, sequence.token_ids[t]));
      }
      EXPECT_EQ(result.sequences[i].*field, expected) << i;
    }
  }

  FakeRunner senior_{1, kVocab, kBlocks.first + kBlocks.count};
  FakeRunner junior_{2, kVocab, kBlocks.first + kBlocks.count};
  Scorer scorer_{
      {.max_batched_tokens = kPassTokens, .blocks = {kBlocks, kBlocks}, .request_limits = {}},
      {0, "zero"},
      &senior_,
      &junior_};
};

TEST_F(ScorerTest, EveryTokenHasTheLogProbOfTheWholePrefix) {
  const ScoreRequest request = Request(21, 23, true, true);
  const auto result = Submit(request);
  Finish();
  ASSERT_TRUE(result->has_value() && (*result)->ok());
  ExpectScores(senior_, request, ***result, &SequenceScores::senior_logprobs);
  ExpectScores(junior_, request, ***result, &SequenceScores::junior_logprobs);
  EXPECT_EQ((**result)->weights, (WeightsVersion{0, "zero"}));
  EXPECT_LE(senior_.largest_pass, kPassTokens);
}

TEST_F(ScorerTest, TheLikeliestTokensOfEveryPlaceAreReturned) {
  ScoreRequest request = Request(9, 30, /*senior=*/true, /*junior=*/true);
  request.num_top_logprobs = 3;
  const auto result = Submit(request);
  Finish();
  TandemSampler sampler;
  for (const auto& [model, field] : {std::pair(&senior_, &SequenceScores::senior_top_tokens),
                                     std::pair(&junior_, &SequenceScores::junior_top_tokens)}) {
    for (size_t i = 0; i < request.sequences.size(); ++i) {
      const ScoreSequence& sequence = request.sequences[i];
      TopTokens expected = {.count = 3, .ids = {}, .logprobs = {}};
      for (size_t t = sequence.first_scored_token; t < sequence.token_ids.size(); ++t) {
        const auto logits = model->Logits(std::span(sequence.token_ids).first(t));
        ASSERT_TRUE(sampler.TokenLogProb(logits, request.temperature, 0).ok());
        for (const LikelyToken& likely : sampler.Top(logits, 3)) {
          expected.ids.push_back(likely.token);
          expected.logprobs.push_back(likely.logprob);
        }
      }
      EXPECT_EQ((**result)->sequences[i].*field, expected) << i;
    }
  }
}

TEST_F(ScorerTest, AStepIsOnePass) {
  Submit(Request(9, 30, true, true));
  Submit(Request(9, 30));
  for (int64_t steps = 1; scorer_.HasWork(); ++steps) {
    scorer_.Step();
    EXPECT_EQ(senior_.passes + junior_.passes, steps);
  }
}

TEST_F(ScorerTest, AShortRequestDoesNotWaitForALongOne) {
  const auto longest = Submit(Request(100, 30));
  const auto shortest = Submit(Request(1, 5));
  // One turn of the first: a group of sequences of up to 33 tokens.
  for (int64_t steps = 0; !shortest->has_value(); ++steps) {
    ASSERT_LE(steps, static_cast<int64_t>(Scorer::kGroupSize) * 33 / kPassTokens + 2);
    scorer_.Step();
  }
  EXPECT_FALSE(longest->has_value());
  Finish();
  EXPECT_TRUE((*longest)->ok());
}

TEST_F(ScorerTest, NewWeightsStartTheSeniorsPartAgain) {
  const ScoreRequest request = Request(20, 23, true, true);
  const auto result = Submit(request);
  while (senior_.passes < 15) scorer_.Step();
  const int64_t junior_passes = junior_.passes;
  senior_.set_weights(9);
  scorer_.OnSeniorUpdated({4, "four"});
  Finish();
  ASSERT_TRUE((*result)->ok());
  ExpectScores(senior_, request, ***result, &SequenceScores::senior_logprobs);
  ExpectScores(junior_, request, ***result, &SequenceScores::junior_logprobs);
  EXPECT_EQ((**result)->weights, (WeightsVersion{4, "four"}));
  EXPECT_EQ(junior_.passes, junior_passes);
}

TEST_F(ScorerTest, AVersionOfTheSameValuesStartsNothingAgain) {
  const ScoreRequest request = Request(20, 23);
  const auto alone = Submit(request);
  Finish();
  const int64_t passes = senior_.passes;
  const auto result = Submit(request);
  scorer_.Step();
  scorer_.OnSeniorUpdated({.version = 4, .digest = (**alone)->weights.digest});
  Finish();
  ASSERT_TRUE((*result)->ok());
  EXPECT_EQ((**result)->weights.version, 4);
  EXPECT_LE(senior_.passes, 2 * passes);
}

TEST_F(ScorerTest, ARequestThatIsAlwaysOvertakenEnds) {
  const auto result = Submit(Request(20, 23));
  for (int64_t version = 1; version <= Scorer::kMaxRestarts + 1; ++version) {
    EXPECT_FALSE(result->has_value());
    scorer_.Step();
    scorer_.OnSeniorUpdated({version, absl::StrCat("next-", version)});
  }
  ASSERT_TRUE(result->has_value());
  EXPECT_EQ((*result)->status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(HasReason((*result)->status(), reason::kWeightsChanged));
  EXPECT_FALSE(scorer_.HasWork());
  EXPECT_EQ(scorer_.num_held_blocks(Author::kSenior), 0);
}

TEST_F(ScorerTest, WhoHasGoneIsNotScored) {
  std::stop_source cancelled;
  CallScope cancellable, expired;
  cancellable.cancellation = cancelled.get_token();
  expired.deadline = SteadyTime();
  const auto first = Submit(Request(9, 30), cancellable);
  const auto late = Submit(Request(9, 30), expired);
  const auto last = Submit(Request(1, 5));
  scorer_.Step();
  cancelled.request_stop();
  scorer_.DropAbandoned();
  ASSERT_TRUE(first->has_value() && late->has_value());
  EXPECT_EQ((*first)->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ((*late)->status().code(), absl::StatusCode::kDeadlineExceeded);
  const int64_t passes = senior_.passes;
  Finish();
  EXPECT_TRUE((*last)->ok());
  EXPECT_EQ(senior_.passes, passes + 1);
}

TEST_F(ScorerTest, AFailedPassFailsItsRequestOnly) {
  const auto broken = Submit(Request(3, 9));
  const auto other = Submit(Request(3, 9));
  senior_.fail_next = absl::InternalError("broken");
  EXPECT_FALSE(scorer_.Step());
  ASSERT_TRUE(broken->has_value());
  EXPECT_EQ((*broken)->status().code(), absl::StatusCode::kInternal);
  Finish();
  EXPECT_TRUE((*other)->ok());
}

TEST_F(ScorerTest, SamplesOfOnePromptShareItsBlocks) {
  ScoreRequest request = {.sequences = {}, .temperature = 0.8};
  for (int i = 0; i < 6; ++i) {
    ScoreSequence sequence = {.token_ids = std::vector<int32_t>(130, 5), .first_scored_token = 130};
    for (int t = 0; t < 7; ++t) sequence.token_ids.push_back((i * 7 + t * 3) % kVocab);
    request.sequences.push_back(std::move(sequence));
  }
  const auto result = Submit(request);
  Finish();
  ASSERT_TRUE(result->has_value() && (*result)->ok());
  ExpectScores(senior_, request, ***result, &SequenceScores::senior_logprobs);
  EXPECT_EQ(senior_.consumed, 136 + 5 * (136 - 128));
}

// The second block is the first one that is not known already.
TEST_F(ScorerTest, SamplesShareBlocksBehindThoseOfAnEarlierRequest) {
  std::vector<int32_t> prompt(150, 5);
  Submit({.sequences = {{.token_ids = {prompt.begin(), prompt.begin() + 70},
                         .first_scored_token = 69}},
          .temperature = 0.8});
  Finish();
  prompt[100] = 6;
  ScoreRequest request = {.sequences = {}, .temperature = 0.8};
  for (int i = 0; i < 4; ++i) {
    request.sequences.push_back({.token_ids = prompt, .first_scored_token = 150});
    request.sequences.back().token_ids.push_back(i);
  }
  senior_.consumed = 0;
  const auto result = Submit(request);
  Finish();
  ASSERT_TRUE(result->has_value() && (*result)->ok());
  ExpectScores(senior_, request, ***result, &SequenceScores::senior_logprobs);
  EXPECT_EQ(senior_.consumed, (150 - 64) + 3 * (150 - 128));
}

// A step beside generation ends in time once a pass of the model has been timed.
TEST_F(ScorerTest, APassIsAsShortAsItShouldBe) {
  constexpr int64_t kMost = 2048;
  const BlockRange blocks = {.first = 0, .count = 64};
  FakeRunner senior(1, kVocab, blocks.count), junior(2, kVocab, blocks.count);
  // A pass takes 10 ms, and 1 ms a token with the senior, a quarter of that with the junior.
  const auto now = [&] {
    return SteadyTime() + absl::Milliseconds(10) * (senior.passes + junior.passes) +
           absl::Milliseconds(1) * senior.consumed + absl::Microseconds(250) * junior.consumed;
  };
  Scorer scorer(
      {.max_batched_tokens = kMost, .blocks = {blocks, blocks}, .request_limits = {}, .clock = now},
      {0, "zero"}, &senior, &junior);
  std::optional<absl::StatusOr<ScoreResult>> result;
  scorer.Submit(Request(3, 1000, true, true), {},
                [&](absl::StatusOr<ScoreResult> ended) { result = std::move(ended); });
  const absl::Duration limit = absl::Milliseconds(60);
  int64_t largest[2] = {};
  while (scorer.HasWork()) {
    const SteadyTime begin = now();
    ASSERT_TRUE(scorer.Step(limit));
    EXPECT_LE(now() - begin, limit);
    largest[0] = std::max(largest[0], senior.largest_pass);
    largest[1] = std::max(largest[1], junior.largest_pass);
  }
  ASSERT_TRUE(result->ok());
  // The speed of a pass is that of the one before, whose time was partly not of its tokens.
  EXPECT_GE(largest[0], 45);
  EXPECT_GE(largest[1], 180);

  // Nobody waits: passes are whole.
  scorer.Submit(Request(3, 1000), {}, [](const absl::StatusOr<ScoreResult>&) {});
  scorer.Step();
  EXPECT_EQ(senior.largest_pass, kMost);
}

TEST_F(ScorerTest, NewWeightsShareNothingWithOldOnes) {
  ScoreRequest request = {.sequences = {}, .temperature = 0.8};
  request.sequences.push_back(
      {.token_ids = std::vector<int32_t>(130, 5), .first_scored_token = 129});
  Submit(request);
  Finish();
  senior_.set_weights(9);
  scorer_.OnSeniorUpdated({1, "one"});
  const auto result = Submit(request);
  Finish();
  ExpectScores(senior_, request, ***result, &SequenceScores::senior_logprobs);
}

}  // namespace
}  // namespace tandem::rollout
