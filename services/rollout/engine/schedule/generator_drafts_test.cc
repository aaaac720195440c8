// Speculative decoding: a response does not depend on drafts, whoever proposes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/testing/generator_harness.h"

namespace tandem::rollout {
namespace {

// Proposes the tokens of a known text, each wrong with the probability `wrong`.
class OracleDrafter final : public Drafter {
 public:
  using Texts = std::vector<std::vector<int32_t>>;
  OracleDrafter(const Texts* texts, double wrong) : texts_(texts), wrong_(wrong) {}

  void Propose(std::span<const int32_t> tokens, int64_t most,
               std::vector<int32_t>& drafts) override {
    for (const std::vector<int32_t>& text : *texts_) {
      if (text.size() < tokens.size() ||
          !std::ranges::equal(std::span(text).first(tokens.size()), tokens))
        continue;
      for (size_t p = tokens.size(); p < text.size() && std::ssize(drafts) < most; ++p) {
        const bool wrong = std::bernoulli_distribution(wrong_)(random_);
        drafts.push_back(wrong ? (text[p] + 1) % kVocab : text[p]);
      }
      return;
    }
  }

 private:
  const Texts* const texts_;
  const double wrong_;
  std::mt19937 random_;
};

std::vector<int32_t> TextOf(const Trajectory& trajectory) {
  std::vector<int32_t> text = trajectory.prompt_token_ids;
  text.insert(text.end(), trajectory.response_token_ids.begin(),
              trajectory.response_token_ids.end());
  return text;
}

// A factory of drafters that know `texts`.
DrafterFactory Oracle(const OracleDrafter::Texts& texts, double wrong) {
  return [&texts, wrong](const SpeculativeParams&) {
    return std::make_unique<OracleDrafter>(&texts, wrong);
  };
}

PromptRequest WithDrafts(PromptRequest request, SpeculativeMethod method, int64_t most = 5) {
  request.speculative = {.method = method, .num_speculative_tokens = most};
  return request;
}

constexpr auto kNgram = SpeculativeMethod::kNgram;
constexpr auto kJunior = SpeculativeMethod::kJunior;
constexpr auto kOfHeads = SpeculativeMethod::kHeads;

int64_t Passes(const Harness& harness) { return harness.senior.passes + harness.junior.passes; }

TEST(GeneratorDraftsTest, RightDraftsSavePassesAndWrongOnesCostNone) {
  PromptRequest solo = Request({.enabled = false});
  solo.sampling.ignore_eos = true;
  Harness plain;
  const Trajectory expected = plain.Run(solo);
  EXPECT_EQ(plain.senior.passes, 30);
  const OracleDrafter::Texts texts = {TextOf(expected)};

  Harness right(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, 0.0));
  ExpectSame(right.Run(WithDrafts(solo, kNgram)), expected);
  EXPECT_EQ(right.senior.passes, 5) << "each writes six tokens";
  EXPECT_EQ(right.Stats().ngram_drafts_total.Sum(), (DraftCounts{.drafted = 25, .accepted = 25}));

  const auto positions = right.Stats().ngram_drafts_total.by_position;
  for (size_t i = 0; i < positions.size(); ++i) {
    EXPECT_EQ(positions[i], (DraftCounts{.drafted = i < 5 ? 5 : 0, .accepted = i < 5 ? 5 : 0}))
        << i;
  }

  Harness wrong(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, 1.0));
  ExpectSame(wrong.Run(WithDrafts(solo, kNgram)), expected);
  EXPECT_EQ(wrong.senior.passes, 30);
  const DraftCounts missed = wrong.Stats().ngram_drafts_total.Sum();
  EXPECT_EQ(missed.accepted, 0);
  EXPECT_EQ(missed.drafted, 5 + 1 + 1 + 1) << "then they pause, and one is tried again";
}

TEST(GeneratorDraftsTest, AStopTextEndsTheResponseWithinDrafts) {
  PromptRequest solo = Request({.enabled = false});
  solo.sampling.ignore_eos = true;
  const Trajectory whole = Harness().Run(solo);
  const OracleDrafter::Texts texts = {TextOf(whole)};
  for (size_t last = 1; last < 12; ++last) {
    solo.sampling.stop = {PieceOf(whole.response_token_ids[last - 1]).substr(1) +
                          PieceOf(whole.response_token_ids[last])};
    const Trajectory stopped = Harness().Run(solo);
    EXPECT_LE(stopped.response_token_ids.size(), last + 1);
    EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
    for (const double wrong : {0.0, 0.3}) {
      Harness harness(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, wrong));
      ExpectSame(harness.Run(WithDrafts(solo, kNgram)), stopped);
    }
  }
}

TEST(GeneratorDraftsTest, AcceptedDraftsAreMarked) {
  PromptRequest solo = Request({.enabled = false});
  solo.sampling.ignore_eos = true;
  solo.sampling.max_tokens = 8;
  Harness plain;
  const OracleDrafter::Texts texts = {TextOf(plain.Run(solo))};
  const auto marks = [&](const PromptRequest& request, double wrong) {
    Harness harness(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, wrong));
    const auto listener = harness.Submit(request);
    harness.Finish();
    return listener->drafts().at(0).accepted_mask;
  };
  EXPECT_THAT(marks(solo, 0.0), testing::IsEmpty()) << "no drafts were asked for";
  const PromptRequest drafted = WithDrafts(solo, kNgram, 2);
  EXPECT_THAT(marks(drafted, 0.0), testing::ElementsAre(1, 1, 0, 1, 1, 0, 1, 0));
  EXPECT_THAT(marks(drafted, 1.0), testing::ElementsAre(0, 0, 0, 0, 0, 0, 0, 0));
}

TEST(DraftTotalsTest, AcceptedDraftsAreTheFirstOfTheirPass) {
  DraftTotals totals;
  totals.Add(3, 1);
  totals.Add(2, 2);
  totals.Add(0, 0);
  EXPECT_EQ(totals.by_position[0], (DraftCounts{.drafted = 2, .accepted = 2}));
  EXPECT_EQ(totals.by_position[1], (DraftCounts{.drafted = 2, .accepted = 1}));
  EXPECT_EQ(totals.by_position[2], (DraftCounts{.drafted = 1, .accepted = 0}));
  EXPECT_EQ(totals.Sum(), (DraftCounts{.drafted = 5, .accepted = 3}));
}

TEST(GeneratorDraftsTest, NoStrategyChangesAndNoneNeedsMorePasses) {
  for (const auto strategy : kStrategies) {
    for (const double wrong : {0.0, 0.3, 1.0}) {
      for (const bool other_logprobs : {false, true}) {
        PromptRequest request = Request(Tandem(strategy), 6, 5);
        request.return_other_logprobs = other_logprobs;
        request.sampling.top_p = 0.9;
        Harness plain;
        const Trajectory expected = plain.Run(request);
        const OracleDrafter::Texts texts = {TextOf(expected)};
        Harness harness(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, wrong));
        ExpectSame(harness.Run(WithDrafts(request, kNgram, 15)), expected);
        EXPECT_LE(Passes(harness), Passes(plain));
        const EngineStats stats = harness.Stats();
        EXPECT_LE(
            harness.senior.consumed + harness.junior.consumed,
            plain.senior.consumed + plain.junior.consumed + stats.ngram_drafts_total.Sum().drafted);
        if (wrong == 0.0) {
          EXPECT_EQ(stats.ngram_drafts_total.Sum().accepted, stats.ngram_drafts_total.Sum().drafted)
              << "no draft is verified behind a change of author";
        }
        EXPECT_EQ(stats.senior_tokens_total, plain.Stats().senior_tokens_total);
        EXPECT_EQ(stats.handoffs_total, plain.Stats().handoffs_total);
      }
    }
  }
}

TEST(GeneratorDraftsTest, TextThatRepeatsIsFoundByNgrams) {
  for (const double temperature : {0.0, 0.1}) {
    PromptRequest request = Request(Tandem(SelectionStrategy::kSentence), 10, 3);
    request.sampling.temperature = temperature;
    request.sampling.max_tokens = 80;
    request.sampling.ignore_eos = true;
    Harness plain, harness;
    for (Harness* one : {&plain, &harness}) one->senior.memory = one->junior.memory = 1;
    const auto listener = harness.Submit(WithDrafts(request, kNgram));
    harness.Finish();
    ExpectSame(listener->finished().at(0), plain.Run(request));
    EXPECT_LT(Passes(harness), Passes(plain));
    EXPECT_GT(listener->drafts().at(0).counts.accepted, 0);
    EXPECT_EQ(listener->drafts().at(0).counts, harness.Stats().ngram_drafts_total.Sum());
  }
}

TEST(GeneratorDraftsTest, AJuniorThatIsTheSeniorWritesDraftsThatAreAllAccepted) {
  for (const auto strategy : kStrategies) {
    for (const bool tandem : {false, true}) {
      for (const bool other_logprobs : {false, true}) {
        PromptRequest request = Request(Tandem(strategy, 0.8), 6, 5);
        request.tandem.enabled = tandem;
        request.return_other_logprobs = other_logprobs;
        request.sampling.temperature = 0.7;
        request.sampling.ignore_eos = true;
        Harness plain(kWide, 7, 7), harness(kWide, 7, 7);
        const Trajectory expected = plain.Run(request);
        ExpectSame(harness.Run(WithDrafts(request, kJunior)), expected);
        const EngineStats stats = harness.Stats();
        EXPECT_EQ(stats.junior_drafts_total.Sum().accepted,
                  stats.junior_drafts_total.Sum().drafted);
        EXPECT_LE(harness.senior.passes, plain.senior.passes);
        if (!tandem) {
          EXPECT_EQ(harness.senior.passes, 5);
          EXPECT_EQ(stats.junior_drafts_total.Sum().drafted, 25);
          // A draft is consumed once: the junior reads the prompt and each token but the last ones.
          EXPECT_EQ(harness.junior.consumed, 6 + 25 + 4 - 1);
          EXPECT_EQ(harness.junior.passes, 25);
        }
      }
    }
  }
}

TEST(GeneratorDraftsTest, AJuniorThatIsNotTheSeniorPausesWhereItIsWrong) {
  PromptRequest request = Request({.enabled = false}, 6, 5);
  request.sampling.ignore_eos = true;
  Harness plain, harness;
  const Trajectory expected = plain.Run(request);
  ExpectSame(harness.Run(WithDrafts(request, kJunior)), expected);
  EXPECT_LE(harness.senior.passes, 30);
  EXPECT_GT(harness.Stats().junior_drafts_total.Sum().drafted, 0);
  EXPECT_LT(harness.junior.passes, 20);
}

TEST(GeneratorDraftsTest, HeadsDraftBehindEachTokenOfTheSenior) {
  PromptRequest request = Request({.enabled = false}, 6, 5);
  request.sampling.temperature = 0.0;
  request.sampling.ignore_eos = true;
  Harness plain;
  const Trajectory expected = plain.Run(request);

  Harness right;
  right.senior.keep_rows = true;
  ExpectSame(right.Run(WithDrafts(request, kOfHeads, 15)), expected);
  EXPECT_EQ(right.Stats().heads_drafts_total.Sum(), (DraftCounts{.drafted = 23, .accepted = 23}));
  EXPECT_EQ(right.senior.passes, 7) << "one token, then up to as many as there are heads and one";
  EXPECT_EQ(right.senior.draft_calls, 6) << "nobody drafts behind the end";
  EXPECT_EQ(right.junior.passes, 0);

  Harness wrong;
  wrong.senior.keep_rows = true;
  wrong.senior.wrong_drafts = 1;
  ExpectSame(wrong.Run(WithDrafts(request, kOfHeads, 15)), expected);
  EXPECT_EQ(wrong.senior.passes, 30);
  EXPECT_EQ(wrong.Stats().heads_drafts_total.Sum(), (DraftCounts{.drafted = 7, .accepted = 0}))
      << "then they pause, and one is tried again";
}

TEST(GeneratorDraftsTest, DraftsOfTheJuniorOutliveAPassThatHasNoRoomForThem) {
  for (const bool right : {true, false}) {
    PromptRequest request = Request({.enabled = false}, 6, 5);
    request.sampling.ignore_eos = true;
    PromptRequest prefill = Request({.enabled = false}, 40, 9);
    prefill.sampling.max_tokens = 1;
    const uint64_t junior = right ? 1 : 2;
    Harness plain(kWide, 1, junior), alone(kWide, 1, junior), harness(kWide, 1, junior);
    const Trajectory expected = plain.Run(request);
    ExpectSame(alone.Run(WithDrafts(request, kJunior)), expected);

    const auto drafted = harness.Submit(WithDrafts(request, kJunior));
    while (harness.junior.passes < 5) harness.generator.Step();
    ASSERT_EQ(harness.senior.passes, 0) << "five drafts wait";
    harness.Submit(prefill);
    harness.generator.Step();
    EXPECT_EQ(harness.senior.passes, 1);
    EXPECT_EQ(harness.Stats().junior_drafts_total.Sum().drafted, 0);
    harness.Finish();
    ExpectSame(drafted->finished().at(0), expected);
    if (right) {
      EXPECT_LE(harness.junior.passes, alone.junior.passes) << "none was written twice";
      EXPECT_EQ(drafted->drafts().at(0).counts.accepted, drafted->drafts().at(0).counts.drafted);
    }
  }
}

// The drafts that are wanted are counted again after each pass, of which eager lanes run two a
// step.
TEST(GeneratorDraftsTest, EagerLanesVerifyTheDraftsThatLaggingOnesDo) {
  for (const auto strategy : kStrategies) {
    for (const int64_t max_tokens : {7, 13, 30}) {
      PromptRequest request = Request(Tandem(strategy, 1.0), 6, 5);
      request.sampling.ignore_eos = true;
      request.sampling.max_tokens = max_tokens;
      Harness lagging(kWide, 7, 7), eager(kWide, 7, 7, /*eager_lanes=*/true);
      const Trajectory expected = lagging.Run(WithDrafts(request, kJunior));
      ExpectSame(eager.Run(WithDrafts(request, kJunior)), expected);
      EXPECT_EQ(eager.Stats().junior_drafts_total.Sum(), lagging.Stats().junior_drafts_total.Sum())
          << static_cast<int>(strategy) << ", " << max_tokens << " tokens";
    }
  }
}

TEST(GeneratorDraftsTest, HeadsChangeNoStrategyAndDraftForTheSeniorAlone) {
  DraftCounts counts;
  for (const auto strategy : kStrategies) {
    for (const double wrong : {0.0, 0.3, 1.0}) {
      for (const bool eager_lanes : {false, true}) {
        PromptRequest request = Request(Tandem(strategy, 0.8), 6, 5);
        request.num_samples = 2;
        request.return_other_logprobs = wrong < 1.0;
        request.sampling.temperature = 0.3;
        Harness plain(kWide, 1, 2, eager_lanes), harness(kWide, 1, 2, eager_lanes);
        harness.senior.keep_rows = true;
        harness.senior.wrong_drafts = wrong;
        const auto expected = plain.Submit(request);
        plain.Finish();
        const auto drafted = harness.Submit(WithDrafts(request, kOfHeads));
        harness.Finish();
        for (const uint64_t sample : {0, 1}) {
          ExpectSame(drafted->finished().at(sample), expected->finished().at(sample));
        }
        EXPECT_EQ(harness.junior.draft_calls, 0);
        EXPECT_LE(harness.senior.passes, plain.senior.passes);
        counts.drafted += harness.Stats().heads_drafts_total.Sum().drafted;
        counts.accepted += harness.Stats().heads_drafts_total.Sum().accepted;
      }
    }
  }
  EXPECT_GT(counts.accepted, 20);
  EXPECT_GT(counts.drafted, counts.accepted);
}

TEST(GeneratorDraftsTest, HeadsThatFailFailThePromptsThatTheyDraftFor) {
  PromptRequest request = Request({.enabled = false});
  request.sampling.ignore_eos = true;
  Harness harness;
  harness.senior.keep_rows = true;
  harness.senior.fail_draft = absl::InternalError("no memory");
  const auto failed = harness.Submit(WithDrafts(request, kOfHeads));
  const auto other = harness.Submit(request);
  harness.Finish();
  EXPECT_EQ(failed->failure(), absl::InternalError("no memory"));
  ExpectSame(other->finished().at(0), Harness().Run(request));
}

TEST(GeneratorDraftsTest, TokensOfAPassAreStreamedInOneEvent) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kChunk));
  request.stream_tokens = true;
  request.sampling.ignore_eos = true;
  const Trajectory expected = Harness().Run(request);
  const OracleDrafter::Texts texts = {TextOf(expected)};
  Harness harness(kWide, 1, 2, /*eager_lanes=*/false, Oracle(texts, 0.0));
  const auto listener = harness.Submit(WithDrafts(request, kNgram));
  harness.Finish();
  std::vector<int32_t> tokens;
  for (const TokensDelta& delta : listener->deltas()) {
    EXPECT_EQ(delta.offset, std::ssize(tokens));
    EXPECT_EQ(delta.token_ids.size(), 3u) << "the chunk of one author";
    EXPECT_EQ(delta.authorship_mask,
              std::vector<Author>(3, expected.authorship_mask[delta.offset]));
    tokens.insert(tokens.end(), delta.token_ids.begin(), delta.token_ids.end());
  }
  EXPECT_EQ(tokens, expected.response_token_ids);
}

// Has no numbers for rows behind a draft.
class BrokenBehindDrafts final : public ModelRunner {
 public:
  explicit BrokenBehindDrafts(ModelRunner* runner) : runner_(runner) {}
  absl::Status Run(const Pass& pass, PassResults& results) override {
    absl::Status status = runner_->Run(pass, results);
    size_t row = 0;
    for (const DecodeInput& sequence : pass.sequences) {
      for (size_t i = 0; i < sequence.output_rows.size(); ++i, ++row) {
        if (i == 0) continue;
        results[row] = absl::InternalError("logits are not numbers");
        ++broken;
      }
    }
    return status;
  }

  int64_t broken = 0;

 private:
  ModelRunner* const runner_;
};

TEST(GeneratorDraftsTest, ARowBehindARejectedDraftMayHaveNoNumbers) {
  const PromptRequest request = Request({.enabled = false});
  const Trajectory expected = Harness().Run(request);
  const OracleDrafter::Texts texts = {TextOf(expected)};
  for (const double wrong : {1.0, 0.0}) {
    FakeRunner fake(1, kVocab, kWide.num_blocks[0]);
    BrokenBehindDrafts runner(&fake);
    const BoundarySets boundaries(Vocabulary(), {});
    GeneratorOptions options;
    options.limits = kWide;
    options.request_limits.max_model_len = 100;
    options.eos_token_ids = {kEos};
    options.senior_weights = {0, "zero"};
    options.make_drafter = Oracle(texts, wrong);
    Generator generator(options, &boundaries, &runner, nullptr);
    const auto listener = std::make_shared<RecordingListener>(1);
    generator.Submit(1, {WithDrafts(request, kNgram), listener});
    while (generator.HasWork()) generator.Step();
    EXPECT_GT(runner.broken, 0);
    if (wrong == 1.0) {
      ExpectSame(listener->finished().at(0), expected);
    } else {
      EXPECT_EQ(listener->failure()->code(), absl::StatusCode::kInternal);
    }
  }
}

// The mask of accepted drafts fits the response and their number, if drafts were asked for.
void ExpectMarked(const SampleDrafts& drafts, const Trajectory& trajectory) {
  if (drafts.accepted_mask.empty()) {
    EXPECT_EQ(drafts.counts, DraftCounts());
    return;
  }
  EXPECT_EQ(drafts.accepted_mask.size(), trajectory.response_token_ids.size());
  EXPECT_EQ(std::ranges::count(drafts.accepted_mask, 1), drafts.counts.accepted);
}

// Random prompts with drafts of every kind that arrive, share prefixes, are cancelled and
// preempted, and see new weights, under random limits.
TEST(GeneratorDraftsTest, RandomWorkloadsWriteTheSameWithDrafts) {
  DraftCounts ngram, junior, heads;
  int64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    SchedulerLimits limits = Limits(1 + below(6), 1 + below(90), 2 + below(3));
    limits.num_blocks[1] = 2 + below(3);
    const uint64_t junior_weights = below(2) == 0 ? 1 : 2;
    const size_t memory = below(2) == 0 ? 2 : 1000;
    const auto set_memory = [&](Harness& harness) {
      harness.senior.memory = harness.junior.memory = memory;
    };
    std::vector<PromptRequest> requests;
    std::vector<std::map<uint64_t, Trajectory>> expected;
    OracleDrafter::Texts texts;
    for (int64_t i = 0; i < 8; ++i) {
      PromptRequest request = Request(Tandem(kStrategies[below(5)], 0.7), 1, 1000 + i);
      const PromptRequest stem = Request({}, static_cast<int>(1 + below(70)), below(3));
      request.prompt_token_ids = stem.prompt_token_ids;
      request.tandem.enabled = below(3) > 0;
      request.num_samples = 1 + below(2);
      request.return_other_logprobs = below(2) == 0;
      request.stream_tokens = below(2) == 0;
      request.sampling.temperature = below(3) * 0.5;
      request.sampling.top_k = static_cast<int32_t>(below(3) * 7);
      request.sampling.max_tokens = static_cast<int32_t>(1 + below(70));
      Harness alone(kWide, 1, junior_weights);
      set_memory(alone);
      const auto listener = alone.Submit(request);
      alone.Finish();
      requests.push_back(request);
      expected.push_back(listener->finished());
      for (const auto& [index, trajectory] : expected.back()) texts.push_back(TextOf(trajectory));
    }
    const double wrong = static_cast<double>(below(4)) / 3;
    const bool from_texts = below(3) > 0;
    Harness harness(limits, 1, junior_weights, /*eager_lanes=*/below(4) == 0,
                    [&](const SpeculativeParams& params) -> std::unique_ptr<Drafter> {
                      if (params.method != kNgram || !from_texts) return MakeDrafter(params);
                      return std::make_unique<OracleDrafter>(&texts, wrong);
                    });
    set_memory(harness);
    harness.senior.keep_rows = true;
    harness.senior.wrong_drafts = wrong;
    std::vector<std::shared_ptr<RecordingListener>> listeners;
    std::vector<bool> cancelled(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      constexpr SpeculativeMethod kMethods[] = {SpeculativeMethod::kNone, kNgram, kJunior,
                                                kOfHeads};
      listeners.push_back(
          harness.Submit(WithDrafts(requests[i], kMethods[below(4)], 1 + below(15))));
      for (int64_t steps = below(25); steps > 0; --steps) harness.generator.Step();
      if (below(5) == 0) {  // the same weights again, so that the tokens stay
        harness.generator.OnSeniorUpdated(
            {0, below(2) == 0 ? "again" : "zero"},
            below(2) == 0 ? OnWeightUpdate::kRecompute : OnWeightUpdate::kKeep);
      }
      if (below(6) == 0) {
        const auto victim = static_cast<size_t>(below(static_cast<int64_t>(i) + 1));
        cancelled[victim] = cancelled[victim] || !listeners[victim]->done();
        harness.generator.Fail(victim + 1, absl::CancelledError("enough"));
      }
    }
    harness.Finish();
    EXPECT_LE(harness.senior.largest_pass, limits.max_batched_tokens);
    EXPECT_LE(harness.junior.largest_pass, limits.max_batched_tokens);
    const EngineStats stats = harness.Stats();
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(listeners[i]->failure().has_value(), cancelled[i]);
      if (cancelled[i]) continue;
      std::map<uint64_t, std::vector<int32_t>> streamed;
      for (const TokensDelta& delta : listeners[i]->deltas()) {
        std::vector<int32_t>& tokens = streamed[delta.sample_index];
        EXPECT_EQ(delta.offset, std::ssize(tokens));
        tokens.insert(tokens.end(), delta.token_ids.begin(), delta.token_ids.end());
      }
      for (const auto& [index, trajectory] : expected[i]) {
        ExpectSame(listeners[i]->finished().at(index), trajectory);
        ExpectMarked(listeners[i]->drafts().at(index), trajectory);
        if (!requests[i].stream_tokens) continue;
        EXPECT_EQ(streamed[index], trajectory.response_token_ids);
      }
    }
    ngram.drafted += stats.ngram_drafts_total.Sum().drafted;
    ngram.accepted += stats.ngram_drafts_total.Sum().accepted;
    junior.drafted += stats.junior_drafts_total.Sum().drafted;
    junior.accepted += stats.junior_drafts_total.Sum().accepted;
    heads.drafted += stats.heads_drafts_total.Sum().drafted;
    heads.accepted += stats.heads_drafts_total.Sum().accepted;
    preemptions += stats.preemptions_total;
  }
  EXPECT_GT(preemptions, 50);
  for (const DraftCounts& counts : {ngram, junior, heads}) {
    EXPECT_GT(counts.accepted, 500);
    EXPECT_GT(counts.drafted, counts.accepted + 500);
  }
}

TEST(GeneratorDraftsTest, DraftsThatMeetNewWeightsAreTheirOwn) {
  // The drafts come from before the update, and the tokens from after it.
  PromptRequest request = Request({.enabled = false}, 6, 21);
  request.sampling.ignore_eos = true;
  for (const SpeculativeMethod method : {kJunior, kOfHeads}) {
    for (const OnWeightUpdate policy : {OnWeightUpdate::kRecompute, OnWeightUpdate::kKeep}) {
      for (int before = 1; before < 12; ++before) {
        Harness harness(kWide, 1, 1);
        harness.senior.keep_rows = true;
        const auto listener = harness.Submit(WithDrafts(request, method));
        for (int i = 0; i < before; ++i) harness.generator.Step();
        harness.senior.set_weights(9);
        harness.generator.OnSeniorUpdated({4, "four"}, policy);
        harness.Finish();
        const Trajectory t = listener->finished().at(0);
        const int64_t old =
            t.senior_versions[0].weights.version == 0 ? t.senior_versions[0].count : 0;
        ASSERT_LT(old, 30);

        Harness plain(kWide, 1, 1);
        const auto expected = plain.Submit(request);
        for (int64_t i = 0; i < old; ++i) plain.generator.Step();
        plain.senior.set_weights(9);
        plain.generator.OnSeniorUpdated({4, "four"}, policy);
        plain.Finish();
        ExpectSame(t, expected->finished().at(0));
        EXPECT_EQ(t.senior_versions, expected->finished().at(0).senior_versions);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::rollout
