// Passes that are planned while the pass runs that draws their tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/steady_time.h"
#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/testing/generator_harness.h"

namespace tandem::rollout {
namespace {

const TandemConfig kSolo = {.enabled = false};

// A harness whose models run behind the host.
std::unique_ptr<Harness> Behind(const SchedulerLimits& limits = kWide) {
  auto harness = std::make_unique<Harness>(limits);
  harness->senior.late = harness->junior.late = true;
  return harness;
}

// A request whose response has all its tokens.
PromptRequest Long(const TandemConfig& tandem, int prompt_length = 5, uint64_t seed = 11) {
  PromptRequest request = Request(tandem, prompt_length, seed);
  request.sampling.ignore_eos = true;
  return request;
}

// Requests that end by stop tokens, which are likely, and by their length.
std::vector<PromptRequest> Requests(const TandemConfig& tandem, int count) {
  std::vector<PromptRequest> requests;
  for (int i = 0; i < count; ++i) {
    requests.push_back(Request(tandem, 5, 100 + static_cast<uint64_t>(i)));
    requests.back().sampling.stop_token_ids = {3, 17};
    requests.back().sampling.max_tokens = 10 + i;
  }
  return requests;
}

std::vector<std::shared_ptr<RecordingListener>> SubmitAll(
    Harness& harness, const std::vector<PromptRequest>& requests) {
  std::vector<std::shared_ptr<RecordingListener>> listeners;
  for (const PromptRequest& request : requests) listeners.push_back(harness.Submit(request));
  return listeners;
}

TEST(GeneratorAheadTest, TheNextPassStartsWhileOneRuns) {
  std::vector<TandemConfig> configs = {kSolo, Tandem(SelectionStrategy::kTurn),
                                       Tandem(SelectionStrategy::kBernoulli, 1.0),
                                       Tandem(SelectionStrategy::kBernoulli, 0.0)};
  for (const TandemConfig& tandem : configs) {
    const std::vector<PromptRequest> requests = Requests(tandem, 12);
    const auto harness = Behind();
    const auto listeners = SubmitAll(*harness, requests);
    harness->Finish();
    int64_t ended = 0, rows = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      Harness alone;
      const Trajectory expected = alone.Run(requests[i]);
      ExpectSame(listeners[i]->finished().at(0), expected);
      rows += alone.senior.consumed + alone.junior.consumed;
      ended += std::ssize(expected.response_token_ids) < requests[i].sampling.max_tokens;
    }
    const int64_t passes = harness->senior.passes + harness->junior.passes;
    // But the first one.
    EXPECT_EQ(harness->senior.ahead_passes + harness->junior.ahead_passes, passes - 1);
    EXPECT_GE(ended, 4);
    // A row for nothing of each response that a token has ended.
    EXPECT_EQ(harness->senior.consumed + harness->junior.consumed, rows + ended);
  }
}

TEST(GeneratorAheadTest, NoRowIsComputedBeyondTheLength) {
  const auto harness = Behind();
  const PromptRequest request = Long(kSolo);
  ExpectSame(harness->Run(request), Harness().Run(request));
  EXPECT_EQ(harness->senior.ahead_passes, 29);
  EXPECT_EQ(harness->senior.consumed, 5 + 29);
}

// Chunks of three tokens: two passes of a lane follow another of the same lane.
TEST(GeneratorAheadTest, ALaneGoesOnUntilTheAuthorChanges) {
  PromptRequest request = Long(Tandem(SelectionStrategy::kChunk));
  request.return_other_logprobs = true;
  const auto harness = Behind();
  ExpectSame(harness->Run(request), Harness().Run(request));
  EXPECT_EQ(harness->senior.ahead_passes, 10);
  EXPECT_EQ(harness->junior.ahead_passes, 10);
  request.tandem = Tandem(SelectionStrategy::kAlternating);
  ExpectSame(harness->Run(request), Harness().Run(request));
  EXPECT_EQ(harness->senior.ahead_passes + harness->junior.ahead_passes, 20);
}

TEST(GeneratorAheadTest, WhatNeedsATokenOnTheHostWaitsForIt) {
  std::vector<PromptRequest> requests(4, Long(kSolo));
  requests[0].num_top_logprobs = 3;
  requests[1].speculative = {.method = SpeculativeMethod::kNgram};
  requests[2].return_routed_experts = true;
  requests[3].tandem = Tandem(SelectionStrategy::kSentence);
  for (const PromptRequest& request : requests) {
    for (const bool beside : {false, true}) {
      const auto harness = Behind();
      if (beside) harness->Submit(Long(kSolo, 5, 12));
      const auto listener = harness->Submit(request);
      while (!listener->done()) harness->generator.Step();
      EXPECT_EQ(harness->senior.ahead_passes, 0);
      harness->Finish();
      ExpectSame(listener->finished().at(0), Harness().Run(request));
    }
  }
}

// The blocks of a response that a token has ended are held until the pass that runs ahead has
// ended, and the response is told then.
TEST(GeneratorAheadTest, AnEndedResponseHoldsItsBlocksWhileAPassWritesThere) {
  PromptRequest request = Long(kSolo);
  request.stream_tokens = true;
  const Trajectory whole = Harness().Run(request);
  request.sampling.stop_token_ids = {whole.response_token_ids[12]};
  const Trajectory expected = Harness().Run(request);
  const size_t length = expected.response_token_ids.size();
  const auto harness = Behind();
  const auto listener = harness->Submit(request);
  while (listener->deltas().size() < length) harness->generator.Step();
  EXPECT_FALSE(listener->done());
  EXPECT_EQ(harness->Stats().senior_kv_tokens, kKvBlockTokens);
  harness->generator.Step();
  EXPECT_TRUE(listener->done());
  EXPECT_EQ(listener->deltas().size(), length);
  harness->Finish();
  ExpectSame(listener->finished().at(0), expected);
}

TEST(GeneratorAheadTest, StopTextsEndAResponseThatRunsAhead) {
  PromptRequest request = Long(kSolo);
  const std::vector<int32_t> ids = Harness().Run(request).response_token_ids;
  request.sampling.stop = {PieceOf(ids[9]) + PieceOf(ids[10])};
  const auto harness = Behind();
  ExpectSame(harness->Run(request), Harness().Run(request));
}

TEST(GeneratorAheadTest, APromptThatArrivesIsReadAtOnce) {
  const auto harness = Behind();
  harness->Submit(Long(kSolo));
  for (int i = 0; i < 5; ++i) harness->generator.Step();
  PromptRequest late = Long(kSolo, 5, 12);
  late.stream_tokens = true;
  const auto listener = harness->Submit(late);
  // A pass runs; the next one has the prompt.
  for (int i = 0; i < 2; ++i) harness->generator.Step();
  EXPECT_EQ(listener->deltas().size(), 1u);
  harness->Finish();
  ExpectSame(listener->finished().at(0), Harness().Run(late));
}

// Tokens of the pass that ran are of the old weights, and all others of the new ones.
TEST(GeneratorAheadTest, NothingIsPlannedAheadAcrossAnUpdate) {
  for (const auto policy : {OnWeightUpdate::kKeep, OnWeightUpdate::kRecompute}) {
    const PromptRequest request = Long(kSolo);
    const auto harness = Behind();
    const auto listener = harness->Submit(request);
    for (int i = 0; i < 9; ++i) harness->generator.Step();
    harness->generator.Settle();
    const int64_t consumed = harness->senior.consumed;
    harness->senior.set_weights(9);
    harness->generator.OnSeniorUpdated({4, "four"}, policy);
    harness->Finish();
    const Trajectory got = listener->finished().at(0);
    ASSERT_EQ(got.senior_versions.size(), 2u);
    EXPECT_EQ(got.senior_versions[0].count, 10);
    EXPECT_EQ(harness->senior.consumed - consumed,
              policy == OnWeightUpdate::kKeep ? 20 : 20 + 5 + 9);

    Harness in_turns;
    const auto expected = in_turns.Submit(request);
    for (int i = 0; i < 10; ++i) in_turns.generator.Step();
    in_turns.senior.set_weights(9);
    in_turns.generator.OnSeniorUpdated({4, "four"}, policy);
    in_turns.Finish();
    ExpectSame(got, expected->finished().at(0));
    EXPECT_EQ(got.senior_versions, expected->finished().at(0).senior_versions);
  }
}

TEST(GeneratorAheadTest, ACancelledPromptLeavesThePassThatRuns) {
  for (const bool late : {false, true}) {
    const auto harness = Behind();
    const std::vector<PromptRequest> requests = {Long(kSolo, 5, 1), Long(kSolo, 60, 2)};
    std::vector<PromptRequest> submitted = requests;
    if (late) submitted[0].deadline = SteadyTime() + absl::Seconds(1);
    const auto listeners = SubmitAll(*harness, submitted);
    for (int i = 0; i < 6; ++i) harness->generator.Step();
    if (late) {
      harness->generator.ExpireDeadlines(SteadyTime() + absl::Seconds(2));
    } else {
      harness->generator.Fail(1, absl::CancelledError("enough"));
    }
    EXPECT_TRUE(listeners[0]->failure().has_value());
    harness->Finish();
    ExpectSame(listeners[1]->finished().at(0), Harness().Run(requests[1]));
  }
}

TEST(GeneratorAheadTest, FailAllLeavesNoPass) {
  const auto harness = Behind();
  const auto listener = harness->Submit(Long(kSolo));
  for (int i = 0; i < 6; ++i) harness->generator.Step();
  harness->generator.FailAll(absl::CancelledError("the end"));
  EXPECT_TRUE(listener->failure().has_value());
  EXPECT_FALSE(harness->generator.HasWork());
  const PromptRequest next = Request(kSolo, 5, 3);
  ExpectSame(harness->Run(next), Harness().Run(next));
}

TEST(GeneratorAheadTest, APreemptedSequenceGoesOn) {
  std::vector<PromptRequest> requests;
  for (uint64_t i = 0; i < 6; ++i) requests.push_back(Long(kSolo, 50, 30 + i));
  const auto harness = Behind(Limits(6, 40, 3));
  const auto listeners = SubmitAll(*harness, requests);
  harness->Finish();
  for (size_t i = 0; i < requests.size(); ++i) {
    ExpectSame(listeners[i]->finished().at(0), Harness().Run(requests[i]));
  }
  EXPECT_GT(harness->Stats().preemptions_total, 0);
  EXPECT_GT(harness->senior.ahead_passes, 20);
}

// The start of a pass fails, or a pass does behind the host: prompts of it fail, and nothing that
// the pass before has drawn is lost.
TEST(GeneratorAheadTest, AFailedPassEndsNoResponseThatATokenHasEnded) {
  int64_t failed = 0, finished = 0;
  for (const bool at_start : {false, true}) {
    for (int steps = 1; steps < 25; ++steps) {
      // The tokens of each response before the failure, which is of the pass that runs, or of the
      // one that starts.
      const int drawn = steps + (at_start ? 1 : 0);
      const std::vector<PromptRequest> requests = Requests(kSolo, 8);
      const auto harness = Behind();
      const auto listeners = SubmitAll(*harness, requests);
      for (int i = 0; i < steps; ++i) harness->generator.Step();
      (at_start ? harness->senior.fail_ahead : harness->senior.fail_next) =
          absl::ResourceExhaustedError("no memory");
      harness->Finish();
      for (size_t i = 0; i < requests.size(); ++i) {
        const Trajectory expected = Harness().Run(requests[i]);
        if (listeners[i]->failure().has_value()) {
          ++failed;
          EXPECT_EQ(listeners[i]->failure()->message(), "no memory");
          EXPECT_GT(std::ssize(expected.response_token_ids), drawn);
        } else {
          ++finished;
          EXPECT_LE(std::ssize(expected.response_token_ids), drawn);
          ExpectSame(listeners[i]->finished().at(0), expected);
        }
      }
    }
  }
  EXPECT_GT(failed, 20);
  EXPECT_GT(finished, 20);
}

}  // namespace
}  // namespace tandem::rollout
