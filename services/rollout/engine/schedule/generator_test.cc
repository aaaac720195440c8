// The laws of tandem rollouts that are pure logic, on models that are hashes.
#include "services/rollout/engine/schedule/generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "common/base/philox.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/tandem_sampler.h"
#include "services/rollout/engine/testing/generator_harness.h"

namespace tandem::rollout {
namespace {

using ::testing::ElementsAre;

// Law 4's function, written from the rules and not from AuthorSelector.
std::vector<Author> DeriveMask(const Trajectory& t) {
  const TandemConfig& c = t.tandem;
  const auto coin = [&](size_t i) -> uint8_t {
    return Uniform(t.seed, t.sample_index, static_cast<uint32_t>(i), RandomPurpose::kAuthor) <
           c.prob_senior;
  };
  std::vector<uint8_t> mask;
  size_t drawn = 0;
  for (size_t i = 0; i < t.response_token_ids.size(); ++i) {
    const bool boundary =
        i > 0 && std::count(c.boundary_token_ids.begin(), c.boundary_token_ids.end(),
                            t.response_token_ids[i - 1]) > 0;
    switch (c.selection_strategy) {
      case SelectionStrategy::kBernoulli:
        mask.push_back(coin(i));
        break;
      case SelectionStrategy::kChunk:
        mask.push_back(i / c.chunk_size % 2 == 0);
        break;
      case SelectionStrategy::kAlternating:
        mask.push_back(i % 2 == 0);
        break;
      case SelectionStrategy::kSentence:
        mask.push_back(i == 0 ? 1 : mask.back() ^ boundary);
        break;
      case SelectionStrategy::kWord:
        if (i == 0 || boundary || i - drawn >= static_cast<size_t>(c.max_gap_tokens)) {
          mask.push_back(coin(i));
          drawn = i;
        } else {
          mask.push_back(mask.back());
        }
        break;
      case SelectionStrategy::kTurn:  // no environment speaks: one turn, the senior's
        mask.push_back(1);
        break;
    }
  }
  std::vector<Author> authors;
  for (const uint8_t senior : mask) {
    authors.push_back(senior != 0 ? Author::kSenior : Author::kJunior);
  }
  return authors;
}

TEST(GeneratorTest, Law1EqualModelsGreedyGiveTheSoloTokens) {
  PromptRequest solo = Request({.enabled = false});
  solo.sampling.temperature = 0;
  const Trajectory expected = Harness(kWide, 7, 7).Run(solo);
  for (const auto strategy : kStrategies) {
    for (const double prob_senior : {0.0, 0.3, 1.0}) {
      PromptRequest request = Request(Tandem(strategy, prob_senior));
      request.sampling.temperature = 0;
      EXPECT_EQ(Harness(kWide, 7, 7).Run(request).response_token_ids, expected.response_token_ids);
    }
  }
}

TEST(GeneratorTest, Law2CertainSeniorIsTandemSwitchedOff) {
  const Trajectory off = Harness().Run(Request({.enabled = false}));
  for (const auto strategy : {SelectionStrategy::kBernoulli, SelectionStrategy::kWord}) {
    Harness harness;
    const Trajectory on = harness.Run(Request(Tandem(strategy, 1.0)));
    ExpectSame(on, off);
    EXPECT_EQ(harness.junior.passes, 0);
  }
  EXPECT_EQ(off.junior_version, "");
}

TEST(GeneratorTest, Law2CertainJuniorIsTheJuniorAlone) {
  const Trajectory alone = Harness(kWide, /*senior_weights=*/2).Run(Request({.enabled = false}));
  const Trajectory junior = Harness().Run(Request(Tandem(SelectionStrategy::kBernoulli, 0.0)));
  EXPECT_EQ(junior.response_token_ids, alone.response_token_ids);
  EXPECT_EQ(junior.author_logprobs, alone.author_logprobs);
  EXPECT_EQ(junior.authorship_mask,
            std::vector<Author>(junior.response_token_ids.size(), Author::kJunior));
}

TEST(GeneratorTest, Law3NeighboursBudgetsAndOrderDoNotMatter) {
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 25; ++i) {
    PromptRequest request = Request(Tandem(kStrategies[i % 5]), 1 + i % 13, 100 + i);
    request.return_other_logprobs = i % 2 == 0;
    request.sampling.top_p = i % 3 == 0 ? 0.8 : 1.0;
    requests.push_back(request);
  }
  std::vector<Trajectory> alone;
  for (const PromptRequest& request : requests) alone.push_back(Harness().Run(request));

  for (const SchedulerLimits& limits :
       {kWide, Limits(3), Limits(7, 5), Limits(25, 1), Limits(25, 100, 2)}) {
    Harness harness(limits);
    std::vector<std::shared_ptr<RecordingListener>> listeners(requests.size());
    std::vector<size_t> order(requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i * 7 % order.size();
    for (size_t k = 0; k < order.size(); ++k) {
      listeners[order[k]] = harness.Submit(requests[order[k]]);
      if (k % 4 == 3) harness.generator.Step();  // the rest arrives later
    }
    harness.Finish();
    EXPECT_LE(harness.senior.largest_pass, limits.max_batched_tokens);
    for (size_t i = 0; i < requests.size(); ++i) {
      ExpectSame(listeners[i]->finished().at(0), alone[i]);
    }
  }
}

// Returns the request that continues a response behind its first `count` tokens.
PromptRequest Continued(PromptRequest request, const Trajectory& whole, size_t count) {
  request.response_token_ids.assign(whole.response_token_ids.begin(),
                                    whole.response_token_ids.begin() + count);
  request.response_authors.assign(whole.authorship_mask.begin(),
                                  whole.authorship_mask.begin() + count);
  request.sampling.max_tokens -= static_cast<int32_t>(count);
  request.first_sample_index = whole.sample_index;
  request.num_samples = 1;
  return request;
}

// Returns what a continuation of the whole response has of it.
Trajectory Rest(Trajectory whole, size_t count) {
  const auto cut = [count](auto& numbers) {
    if (!numbers.empty()) numbers.erase(numbers.begin(), numbers.begin() + count);
  };
  cut(whole.response_token_ids);
  cut(whole.authorship_mask);
  cut(whole.author_logprobs);
  cut(whole.other_logprobs);
  cut(whole.log_keep_mass);
  return whole;
}

TEST(GeneratorTest, AContinuedResponseEqualsTheUninterruptedOne) {
  for (const auto strategy : kStrategies) {
    for (const bool drafts : {false, true}) {
      PromptRequest request = Request(Tandem(strategy), 21);
      request.num_samples = 3;
      request.return_other_logprobs = true;
      request.sampling.top_p = 0.9;
      if (drafts) request.speculative = {.method = SpeculativeMethod::kNgram};
      Harness warm;
      const auto listener = warm.Submit(request);
      warm.Finish();
      for (const auto& [index, whole] : listener->finished()) {
        const size_t length = whole.response_token_ids.size();
        for (const size_t count : {size_t{1}, length / 2, length - 1}) {
          if (count == 0 || count >= length) continue;
          const PromptRequest rest = Continued(request, whole, count);
          for (Harness* harness : {&warm, std::make_unique<Harness>(Limits(2, 7)).release()}) {
            const std::unique_ptr<Harness> owned(harness == &warm ? nullptr : harness);
            const auto heard = harness->Submit(rest);
            harness->Finish();
            ASSERT_EQ(heard->finished().size(), 1u);
            const Trajectory got = heard->finished().at(index);
            ExpectSame(got, Rest(whole, count));
            EXPECT_EQ(got.response_offset, std::ssize(rest.response_token_ids));
            EXPECT_EQ(got.sample_index, whole.sample_index);
            EXPECT_EQ(got.senior_versions.at(0).count, std::ssize(got.response_token_ids));
          }
        }
      }
    }
  }
}

TEST(GeneratorTest, AContinuationReadsWhatTheCacheLostAlone) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kAlternating), 40);
  request.sampling.ignore_eos = true;
  Harness harness;
  const auto listener = harness.Submit(request);
  harness.Finish();
  const Trajectory whole = listener->finished().at(0);
  const int64_t shared = harness.Stats().shared_prefix_tokens_total;
  harness.Submit(Continued(request, whole, 25));
  harness.Finish();
  // Both lanes find the whole block of the 40 + 25 tokens.
  EXPECT_EQ(harness.Stats().shared_prefix_tokens_total - shared, 2 * kKvBlockTokens);
}

TEST(GeneratorTest, ATurnReadsTheTokensSinceTheLastOneAlone) {
  for (const bool enabled : {false, true}) {
    TandemConfig tandem = Tandem(SelectionStrategy::kAlternating);
    tandem.enabled = enabled;
    PromptRequest request = Request(tandem, 40);
    request.sampling.ignore_eos = true;
    Harness harness;
    Trajectory whole = harness.Run(request);
    int64_t unread = 1;  // the last token that was drawn
    for (int turn = 0; turn < 3; ++turn) {
      PromptRequest next = Continued(request, whole, whole.response_token_ids.size());
      next.response_token_ids.push_back(7);
      next.response_authors.push_back(Author::kEnvironment);
      next.sampling.max_tokens = 4;
      const int64_t shared = harness.Stats().shared_prefix_tokens_total;
      const Trajectory got = harness.Run(next);
      const int64_t taken = harness.Stats().shared_prefix_tokens_total - shared;
      const int64_t given = 40 + std::ssize(next.response_token_ids);
      // The junior may lag by a token more.
      EXPECT_GE(taken, (enabled ? 2 : 1) * (given - 1 - unread) - (enabled ? 1 : 0));
      ExpectSame(got, Harness().Run(next));
      whole.response_token_ids = next.response_token_ids;
      whole.authorship_mask = next.response_authors;
      whole.response_token_ids.insert(whole.response_token_ids.end(),
                                      got.response_token_ids.begin(), got.response_token_ids.end());
      whole.authorship_mask.insert(whole.authorship_mask.end(), got.authorship_mask.begin(),
                                   got.authorship_mask.end());
    }
  }
}

TEST(GeneratorTest, TheLikeliestTokensOfEachAuthorAreRecorded) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord));
  request.return_other_logprobs = true;
  const Trajectory plain = Harness().Run(request);
  EXPECT_EQ(plain.top_tokens, TopTokens());
  request.num_top_logprobs = 4;
  for (const bool drafts : {false, true}) {
    if (drafts) request.speculative = {.method = SpeculativeMethod::kNgram};
    Harness harness;
    const Trajectory got = harness.Run(request);
    ExpectSame(got, plain);
    TandemSampler sampler;
    std::vector<int32_t> tokens = got.prompt_token_ids;
    TopTokens expected = {.count = 4, .ids = {}, .logprobs = {}};
    for (size_t t = 0; t < got.response_token_ids.size(); ++t) {
      const FakeRunner& model =
          got.authorship_mask[t] == Author::kSenior ? harness.senior : harness.junior;
      const std::vector<float> logits = model.Logits(tokens);
      ASSERT_TRUE(sampler.TokenLogProb(logits, 1.0, 0).ok());
      for (const LikelyToken& likely : sampler.Top(logits, 4)) {
        expected.ids.push_back(likely.token);
        expected.logprobs.push_back(likely.logprob);
      }
      tokens.push_back(got.response_token_ids[t]);
    }
    EXPECT_EQ(got.top_tokens, expected);
  }
}

// Law 4 for turns: authors follow from the tokens, the seed and where turns begin.
TEST(GeneratorTest, ATurnBehindAnEnvironmentHasItsOwnAuthors) {
  for (const auto strategy : kStrategies) {
    PromptRequest request = Request(Tandem(strategy));
    request.sampling.ignore_eos = true;
    Harness harness;
    const Trajectory first = harness.Run(request);
    PromptRequest next = Continued(request, first, first.response_token_ids.size());
    for (const int32_t said : {17, 3, 22}) {
      next.response_token_ids.push_back(said);
      next.response_authors.push_back(Author::kEnvironment);
    }
    next.sampling.max_tokens = 25;
    const Trajectory turn = harness.Run(next);
    ExpectSame(turn, Harness(Limits(1, 3)).Run(next));
    EXPECT_EQ(turn.response_offset, 33);
    EXPECT_EQ(turn.finish_reason, FinishReason::kLength);
    ASSERT_EQ(turn.authorship_mask.size(), 25u);
    AuthorSelector selector(request.tandem, request.seed, 0,
                            harness.boundaries.Resolve(request.tandem));
    for (const int32_t token : first.response_token_ids) selector.OnToken(token);
    for (int i = 0; i < 3; ++i) selector.OnEnvironmentToken();
    for (size_t t = 0; t < 25; ++t) {
      EXPECT_EQ(turn.authorship_mask[t], selector.NextAuthor());
      selector.OnToken(turn.response_token_ids[t]);
    }
  }
}

TEST(GeneratorTest, StopTextsMatchWithinATurn) {
  PromptRequest request = Request({.enabled = false});
  request.sampling.ignore_eos = true;
  const Trajectory whole = Harness().Run(request);
  const auto& ids = whole.response_token_ids;
  // The text of tokens 9 and 10: a continuation between the two ends with the second.
  request.sampling.stop = {PieceOf(ids[9]) + PieceOf(ids[10])};
  const Trajectory rest = Harness().Run(Continued(request, whole, 10));
  EXPECT_EQ(rest.finish_reason, FinishReason::kStop);
  EXPECT_EQ(rest.response_token_ids, std::vector<int32_t>{ids[10]});
  // Behind an environment it does not: what was said before does not belong to the turn.
  PromptRequest turn = Continued(request, whole, 9);
  turn.response_token_ids.push_back(ids[9]);
  turn.response_authors.push_back(Author::kEnvironment);
  EXPECT_EQ(Harness().Run(turn).response_token_ids[0], ids[10]);
  EXPECT_GT(Harness().Run(turn).response_token_ids.size(), 1u);
  // A text that has ended a turn does not end its continuation, too.
  request.sampling.stop = {PieceOf(ids[9])};
  EXPECT_GT(Harness().Run(Continued(request, whole, 10)).response_token_ids.size(), 1u);
}

TEST(GeneratorTest, Law3SamplesThatShareAPromptEqualSamplesAlone) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord), 12);
  request.num_samples = 6;
  request.return_other_logprobs = true;
  Harness together;
  const auto listener = together.Submit(request);
  together.Finish();
  const auto samples = listener->finished();
  ASSERT_EQ(samples.size(), 6u);

  // Same seed: sample 0 alone is the same as sample 0 of six.
  request.num_samples = 1;
  ExpectSame(samples.at(0), Harness().Run(request));
  EXPECT_NE(samples.at(0).response_token_ids, samples.at(1).response_token_ids);

  // The prompt's first 11 tokens were consumed once per model, not six times.
  int64_t response_tokens = 0;
  for (const auto& [index, sample] : samples) {
    EXPECT_EQ(sample.sample_index, index);
    response_tokens += static_cast<int64_t>(sample.response_token_ids.size());
  }
  EXPECT_LE(together.senior.consumed, 11 + 6 + response_tokens);
  EXPECT_LE(together.junior.consumed, 11 + 6 + response_tokens);
}

TEST(GeneratorTest, Law4TheMaskCanBeDerived) {
  for (const auto strategy : kStrategies) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      const Trajectory t = Harness().Run(Request(Tandem(strategy), 4, seed));
      EXPECT_EQ(t.authorship_mask, DeriveMask(t));
    }
  }
}

TEST(GeneratorTest, Law5LazyLanesEqualRunningBothModelsOnEveryToken) {
  for (const auto strategy : kStrategies) {
    PromptRequest request = Request(Tandem(strategy), 6, 5);
    request.return_other_logprobs = true;
    request.sampling.temperature = 0.8;
    Harness harness(Limits(kWide.max_num_seqs, 4));
    const Trajectory t = harness.Run(request);

    TandemSampler sampler;
    std::vector<int32_t> tokens = request.prompt_token_ids;
    for (size_t i = 0; i < t.response_token_ids.size(); ++i) {
      const auto senior = harness.senior.Logits(tokens);
      const auto junior = harness.junior.Logits(tokens);
      const bool by_senior = t.authorship_mask[i] == Author::kSenior;
      const auto drawn = *sampler.Sample(
          by_senior ? senior : junior, request.sampling,
          Uniform(request.seed, 0, static_cast<uint32_t>(i), RandomPurpose::kToken));
      ASSERT_EQ(t.response_token_ids[i], drawn.token);
      EXPECT_EQ(t.author_logprobs[i], drawn.logprob);
      EXPECT_EQ(t.other_logprobs[i],
                *sampler.TokenLogProb(by_senior ? junior : senior, 0.8, drawn.token));
      tokens.push_back(drawn.token);
    }
  }
}

TEST(GeneratorTest, Law5EagerLanesWriteTheSameWithMorePasses) {
  for (const auto strategy : kStrategies) {
    for (const bool other_logprobs : {false, true}) {
      PromptRequest request = Request(Tandem(strategy), 6, 5);
      request.num_samples = 3;
      request.return_other_logprobs = other_logprobs;
      Harness lazy, eager(kWide, 1, 2, /*eager_lanes=*/true);
      const auto expected = lazy.Submit(request), actual = eager.Submit(request);
      lazy.Finish();
      eager.Finish();
      // Both models consume the prompt once, and then every token but the last ones.
      int64_t most = 5;
      for (const auto& [index, trajectory] : expected->finished()) {
        ExpectSame(actual->finished().at(index), trajectory);
        most += static_cast<int64_t>(trajectory.response_token_ids.size());
      }
      EXPECT_LE(lazy.senior.passes + lazy.junior.passes, eager.senior.passes + eager.junior.passes);
      EXPECT_GE(std::min(eager.senior.consumed, eager.junior.consumed), most - 3 * 2);
    }
  }
}

TEST(GeneratorTest, Law6EveryTokenHasAnAuthorALogProbAndAVersion) {
  for (const auto strategy : kStrategies) {
    PromptRequest request = Request(Tandem(strategy));
    request.sampling.top_k = 5;
    request.return_other_logprobs = true;
    const Trajectory t = Harness().Run(request);
    const size_t length = t.response_token_ids.size();
    EXPECT_EQ(t.authorship_mask.size(), length);
    EXPECT_EQ(t.author_logprobs.size(), length);
    EXPECT_EQ(t.other_logprobs.size(), length);
    EXPECT_EQ(t.log_keep_mass.size(), length);
    for (const float value : t.other_logprobs) EXPECT_FALSE(std::isnan(value));
    for (const float value : t.log_keep_mass) EXPECT_LT(value, 0.0f);
    EXPECT_THAT(t.senior_versions,
                ElementsAre(VersionRun{{0, "zero"}, static_cast<int64_t>(length)}));
    EXPECT_EQ(t.junior_version, "junior");
  }
}

TEST(GeneratorTest, TheIdleLaneIsNotRunWithoutNeed) {
  Harness harness;
  const Trajectory t = harness.Run(Request(Tandem(SelectionStrategy::kBernoulli), 8, 3));
  // Each model consumes every token at most once, and never the last one.
  const int64_t all = 8 + static_cast<int64_t>(t.response_token_ids.size()) - 1;
  EXPECT_LE(harness.senior.consumed, all);
  EXPECT_LE(harness.junior.consumed, all);
  EXPECT_LT(harness.senior.consumed + harness.junior.consumed, 2 * all);
  // One pass per token: a lane catches up in the pass it writes from.
  EXPECT_EQ(harness.senior.passes + harness.junior.passes,
            static_cast<int64_t>(t.response_token_ids.size()));
}

TEST(GeneratorTest, StopsAtEosStopIdsAndLimits) {
  PromptRequest request = Request({.enabled = false});
  request.sampling.ignore_eos = true;
  const Trajectory whole = Harness().Run(request);
  EXPECT_EQ(whole.finish_reason, FinishReason::kLength);
  EXPECT_EQ(whole.response_token_ids.size(), 30u);

  const int32_t stop = whole.response_token_ids[9];
  const auto first =
      std::find(whole.response_token_ids.begin(), whole.response_token_ids.end(), stop);
  request.sampling.stop_token_ids = {stop};
  const Trajectory stopped = Harness().Run(request);
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.response_token_ids,
            std::vector<int32_t>(whole.response_token_ids.begin(), first + 1));

  request.sampling.stop_token_ids = {};
  request.sampling.max_tokens = 1000;  // the model's limit is 100
  EXPECT_EQ(Harness().Run(request).response_token_ids.size(), 95u);

  request.sampling.ignore_eos = false;
  bool any_eos = false;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    request.seed = seed;
    const Trajectory t = Harness().Run(request);
    const auto eos = std::find(t.response_token_ids.begin(), t.response_token_ids.end(), kEos);
    if (eos == t.response_token_ids.end()) continue;
    any_eos = true;
    EXPECT_EQ(eos + 1, t.response_token_ids.end());
    EXPECT_EQ(t.finish_reason, FinishReason::kStop);
  }
  EXPECT_TRUE(any_eos);
}

TEST(GeneratorTest, StopsAtATextOverSeveralTokens) {
  for (const TandemConfig& tandem :
       {TandemConfig{.enabled = false}, Tandem(SelectionStrategy::kAlternating)}) {
    PromptRequest request = Request(tandem);
    request.sampling.ignore_eos = true;
    const std::vector<int32_t> whole = Harness().Run(request).response_token_ids;
    // Begins within a token, and ends within another.
    const std::string stop = PieceOf(whole[8]).substr(1) + PieceOf(whole[9]) + "<";
    std::string text;
    size_t length = 0;
    while (text.find(stop) == std::string::npos) text += PieceOf(whole.at(length++));
    EXPECT_LE(length, 11u);
    request.sampling.stop = {"nowhere", stop};
    const Trajectory stopped = Harness().Run(request);
    EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
    EXPECT_EQ(stopped.response_token_ids,
              std::vector<int32_t>(whole.begin(), whole.begin() + length));
    EXPECT_EQ(stopped.sampling, request.sampling);
    // Preemption, and neighbours, change nothing.
    Harness narrow(Limits(25, 100, 2));
    const auto first = narrow.Submit(request);
    PromptRequest neighbour = Request(tandem, 9, 23);
    const auto other = narrow.Submit(neighbour);
    narrow.Finish();
    ExpectSame(first->finished().at(0), stopped);
  }
}

TEST(GeneratorTest, StreamsEveryTokenInOrder) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord));
  request.stream_tokens = true;
  request.num_samples = 3;
  Harness harness;
  const auto listener = harness.Submit(request);
  harness.Finish();
  std::map<uint64_t, Trajectory> streamed;
  for (const TokensDelta& delta : listener->deltas()) {
    Trajectory& t = streamed[delta.sample_index];
    EXPECT_EQ(delta.offset, static_cast<int64_t>(t.response_token_ids.size()));
    t.response_token_ids.insert(t.response_token_ids.end(), delta.token_ids.begin(),
                                delta.token_ids.end());
    t.authorship_mask.insert(t.authorship_mask.end(), delta.authorship_mask.begin(),
                             delta.authorship_mask.end());
  }
  for (const auto& [index, t] : listener->finished()) {
    EXPECT_EQ(streamed[index].response_token_ids, t.response_token_ids);
    EXPECT_EQ(streamed[index].authorship_mask, t.authorship_mask);
  }
}

TEST(GeneratorTest, CancelFreesRunningAndQueuedSamples) {
  Harness harness(Limits(2));
  PromptRequest request = Request(Tandem(SelectionStrategy::kAlternating));
  request.num_samples = 4;
  const auto cancelled = harness.Submit(request);
  const auto other = harness.Submit(Request({.enabled = false}));
  harness.generator.Step();
  harness.generator.Fail(1, absl::CancelledError("enough"));
  EXPECT_EQ(cancelled->failure()->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(harness.generator.running(), 0);
  EXPECT_EQ(harness.Stats().senior_kv_tokens, 0);
  harness.generator.Fail(1, absl::CancelledError("again"));
  harness.Finish();
  ExpectSame(other->finished().at(0), Harness().Run(Request({.enabled = false})));
}

TEST(GeneratorTest, DeadlinesHoldInTheQueueToo) {
  Harness harness(Limits(1));
  const SteadyTime start = SteadyTime();
  const auto running = harness.Submit(Request({.enabled = false}));
  PromptRequest late = Request({.enabled = false});
  late.deadline = start + absl::Seconds(5);
  const auto queued = harness.Submit(late);
  harness.generator.Step();
  harness.generator.ExpireDeadlines(start + absl::Seconds(4));
  EXPECT_FALSE(queued->done());
  harness.generator.ExpireDeadlines(start + absl::Seconds(5));
  EXPECT_EQ(queued->failure()->code(), absl::StatusCode::kDeadlineExceeded);
  harness.Finish();
  EXPECT_EQ(running->finished().size(), 1u);
}

TEST(GeneratorTest, APromptWhoseDeadlineHasPassedCostsNoPass) {
  Harness harness;
  EXPECT_EQ(harness.generator.next_deadline(), SteadyTime::InfiniteFuture());
  const SteadyTime start = SteadyTime();
  PromptRequest late = Request({.enabled = false});
  late.deadline = start + absl::Seconds(5);
  PromptRequest later = late;
  later.deadline = start + absl::Seconds(9);
  const auto second = harness.Submit(later), first = harness.Submit(late);
  EXPECT_EQ(harness.generator.next_deadline(), late.deadline);
  harness.generator.ExpireDeadlines(start + absl::Seconds(6));
  EXPECT_EQ(first->failure(), absl::DeadlineExceededError("the deadline passed in the queue"));
  EXPECT_FALSE(second->done());
  EXPECT_EQ(harness.Stats().sequences_waiting, 1);
  EXPECT_EQ(harness.generator.next_deadline(), later.deadline);
  EXPECT_EQ(harness.senior.passes, 0);
  harness.Finish();
  EXPECT_EQ(harness.generator.next_deadline(), SteadyTime::InfiniteFuture());
}

TEST(GeneratorTest, AStreamOfManyPromptsDoesNotDelayAnothersFew) {
  Harness harness(Limits(8));
  std::vector<std::shared_ptr<RecordingListener>> many, few;
  for (int i = 0; i < 400; ++i) many.push_back(harness.Submit(Request({}, 3, i), /*stream=*/1));
  while (!many[20]->done()) harness.generator.Step();
  const auto finished = [&] {
    return std::ranges::count_if(many, [](const auto& listener) { return listener->done(); });
  };
  const int64_t before = finished();
  for (int i = 0; i < 4; ++i) few.push_back(harness.Submit(Request({}, 3, 500 + i), /*stream=*/2));
  const auto is_done = [](const auto& listener) { return listener->done(); };
  while (!std::ranges::all_of(few, is_done)) harness.generator.Step();
  // Four places become free, and then all run beside four others.
  EXPECT_LE(finished() - before, 4 + 4 * 30);
  EXPECT_LT(finished(), 200) << "400 were there before";
  harness.Finish();
}

TEST(GeneratorTest, LowPriorityEndsUnderASteadyLoadOfHighPriority) {
  // There are blocks for two short sequences, or for one that has grown.
  Harness harness(Limits(2, 40, 3));
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord), 50, 7);
  request.sampling.ignore_eos = true;
  const Trajectory expected = Harness().Run(request);
  PromptRequest high = request;
  high.priority = 1;
  std::shared_ptr<RecordingListener> low;
  for (int steps = 0; low == nullptr || !low->done(); ++steps) {
    ASSERT_LT(steps, 5000) << "it starves";
    if (steps % 5 == 0) {
      high.seed = 100 + steps;
      harness.Submit(high, /*stream=*/steps);
    }
    if (steps == 30) low = harness.Submit(request);
    harness.generator.Step();
  }
  ExpectSame(low->finished().at(0), expected);
  EXPECT_GT(harness.Stats().sequences_waiting, WaitingQueue::kMaxPassedOver) << "there was no load";
  harness.Finish();
}

TEST(GeneratorTest, APriorityChangesTheOrderAndNotTheTokens) {
  Harness harness(Limits(1));
  std::vector<PromptRequest> requests;
  std::vector<std::shared_ptr<RecordingListener>> listeners;
  for (const int32_t priority : {0, 0, 5}) {
    requests.push_back(Request(Tandem(SelectionStrategy::kWord), 5, 40 + requests.size()));
    requests.back().priority = priority;
    listeners.push_back(harness.Submit(requests.back()));
  }
  while (!listeners[2]->done()) harness.generator.Step();
  EXPECT_FALSE(listeners[0]->done());
  harness.Finish();
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].priority = 0;
    ExpectSame(listeners[i]->finished().at(0), Harness().Run(requests[i]));
  }
}

TEST(GeneratorTest, AFailedPassFailsItsPromptsOnly) {
  Harness harness;
  const auto senior_only = harness.Submit(Request({.enabled = false}));
  const auto mixed = harness.Submit(Request(Tandem(SelectionStrategy::kBernoulli, 0.0)));
  harness.junior.fail_next = absl::InternalError("broken");
  while (!mixed->done()) harness.generator.Step();
  EXPECT_EQ(mixed->failure()->code(), absl::StatusCode::kInternal);
  harness.Finish();
  EXPECT_EQ(senior_only->finished().size(), 1u);
}

TEST(GeneratorTest, AVersionOfTheSameValuesRecomputesNothing) {
  PromptRequest request = Request({.enabled = false});
  request.sampling.ignore_eos = true;
  const auto run = [&](const std::string& digest) {
    Harness harness;
    const auto listener = harness.Submit(request);
    for (int i = 0; i < 12; ++i) harness.generator.Step();
    harness.generator.OnSeniorUpdated({4, digest}, OnWeightUpdate::kRecompute);
    harness.Finish();
    const std::vector<VersionRun> versions = listener->finished().at(0).senior_versions;
    EXPECT_EQ(versions.back().weights, (WeightsVersion{4, digest}));
    EXPECT_EQ(versions.size(), 2u);
    return harness.senior.consumed;
  };
  Harness undisturbed;
  undisturbed.Run(request);
  EXPECT_EQ(run("zero"), undisturbed.senior.consumed);
  EXPECT_GT(run("four"), undisturbed.senior.consumed);
}

TEST(GeneratorTest, ARecomputedLaneWritesUnderTheNewWeights) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord), 6, 21);
  request.sampling.ignore_eos = true;
  request.return_other_logprobs = true;
  Harness harness;
  const auto listener = harness.Submit(request);
  for (int i = 0; i < 12; ++i) harness.generator.Step();
  const int64_t before = harness.senior.consumed;
  harness.senior.set_weights(9);
  harness.generator.OnSeniorUpdated({4, "four"}, OnWeightUpdate::kRecompute);
  harness.Finish();
  const Trajectory t = listener->finished().at(0);
  EXPECT_GT(harness.senior.consumed, before + 6);
  ASSERT_EQ(t.senior_versions.size(), 2u);
  EXPECT_EQ(t.senior_versions[0].weights, (WeightsVersion{0, "zero"}));
  EXPECT_EQ(t.senior_versions[1].weights, (WeightsVersion{4, "four"}));
  EXPECT_EQ(t.senior_versions[0].count + t.senior_versions[1].count, 30);

  // Whatever the senior says of a token comes from the version that the token is labelled with,
  // having read everything before it.
  TandemSampler sampler;
  std::vector<int32_t> tokens = request.prompt_token_ids;
  for (int64_t i = 0; i < 30; ++i) {
    const FakeRunner senior(i < t.senior_versions[0].count ? 1 : 9, kVocab, /*num_blocks=*/0);
    const bool by_senior = t.authorship_mask[i] == Author::kSenior;
    const auto logprob = [&](const FakeRunner& model) {
      return *sampler.TokenLogProb(model.Logits(tokens), 1.0, t.response_token_ids[i]);
    };
    EXPECT_EQ(t.author_logprobs[i], logprob(by_senior ? senior : harness.junior));
    EXPECT_EQ(t.other_logprobs[i], logprob(by_senior ? harness.junior : senior));
    tokens.push_back(t.response_token_ids[i]);
  }
}

TEST(GeneratorTest, AKeptLaneIsNotComputedAgainNorShared) {
  Harness harness(Limits(1));
  PromptRequest request = Request({.enabled = false}, 9);
  request.num_samples = 2;
  const auto listener = harness.Submit(request);
  harness.generator.Step();
  const int64_t before = harness.senior.consumed;
  harness.generator.OnSeniorUpdated({1, "one"}, OnWeightUpdate::kKeep);
  harness.generator.Step();
  EXPECT_EQ(harness.senior.consumed, before + 1);
  harness.Finish();
}

TEST(GeneratorTest, APreemptedSequenceGoesOnAsIfNothingHadHappened) {
  // Two blocks a lane hold one sequence of 100 tokens; each of these comes to need two.
  std::vector<PromptRequest> requests;
  for (int i = 0; i < 6; ++i) {
    PromptRequest request = Request(Tandem(kStrategies[i % 5]), 50, 30 + i);
    request.sampling.ignore_eos = true;
    request.return_other_logprobs = i % 2 == 0;
    requests.push_back(request);
  }
  Harness harness(Limits(6, 40, 3));
  std::vector<std::shared_ptr<RecordingListener>> listeners;
  for (const PromptRequest& request : requests) listeners.push_back(harness.Submit(request));
  harness.Finish();
  for (size_t i = 0; i < requests.size(); ++i) {
    ExpectSame(listeners[i]->finished().at(0), Harness().Run(requests[i]));
  }
  EXPECT_GT(harness.Stats().preemptions_total, 0);
}

// The fake's experts are the token and the token plus 1000.
void ExpectRoutingOfEveryTokenButTheLast(const Trajectory& t) {
  std::vector<uint16_t> expected;
  std::vector<int32_t> tokens = t.prompt_token_ids;
  tokens.insert(tokens.end(), t.response_token_ids.begin(), t.response_token_ids.end() - 1);
  for (const int32_t token : tokens) {
    expected.insert(expected.end(),
                    {static_cast<uint16_t>(token), static_cast<uint16_t>(token + 1000)});
  }
  EXPECT_EQ(t.routed_experts.ids, expected);
  EXPECT_EQ(t.routed_experts.layers, 2);
  EXPECT_EQ(t.routed_experts.experts_per_token, 1);
}

// Beside prompts that record nothing, with shared prefixes, preemption, drafts and new weights.
TEST(GeneratorTest, ARecordOfRoutingHasEveryTokenButTheLast) {
  for (const SchedulerLimits& limits : {kWide, Limits(6, 40, 3), Limits(4, 7)}) {
    Harness harness(limits);
    std::vector<PromptRequest> requests;
    for (int i = 0; i < 12; ++i) {
      PromptRequest request = Request(Tandem(kStrategies[i % 5], i == 4 ? 0 : 0.5), 66, 30);
      request.seed = 100 + i;
      request.sampling.max_tokens = 20 + i;
      request.sampling.ignore_eos = i % 2 == 0;
      request.num_samples = 1 + i % 3;
      request.return_other_logprobs = i % 3 == 0;
      request.return_routed_experts = i % 4 != 3;
      if (i % 5 == 1) request.speculative.method = SpeculativeMethod::kNgram;
      if (i % 5 == 2) request.speculative.method = SpeculativeMethod::kJunior;
      requests.push_back(request);
    }
    std::vector<std::shared_ptr<RecordingListener>> listeners;
    for (const PromptRequest& request : requests) listeners.push_back(harness.Submit(request));
    for (int i = 0; i < 30; ++i) harness.generator.Step();
    harness.generator.OnSeniorUpdated({1, "one"}, OnWeightUpdate::kRecompute);
    harness.Finish();
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(listeners[i]->failure(), std::nullopt);
      for (const auto& [sample, trajectory] : listeners[i]->finished()) {
        SCOPED_TRACE(testing::Message() << "prompt " << i << ", sample " << sample);
        if (requests[i].return_routed_experts) {
          ExpectRoutingOfEveryTokenButTheLast(trajectory);
        } else {
          EXPECT_TRUE(trajectory.routed_experts.empty());
        }
      }
    }
  }
}

TEST(GeneratorTest, ARecordOfRoutingChangesNoToken) {
  PromptRequest request = Request(Tandem(SelectionStrategy::kWord), 70);
  const Trajectory without = Harness().Run(request);
  request.return_routed_experts = true;
  Harness harness;
  Trajectory with = harness.Run(request);
  EXPECT_FALSE(with.routed_experts.empty());
  // The next prompt shares the record of the first one.
  EXPECT_EQ(harness.Run(request), with);
  EXPECT_GT(harness.Stats().shared_prefix_tokens_total, 0);
  with.routed_experts = {};
  EXPECT_EQ(with, without);
}

TEST(GeneratorTest, AConversationsNextTurnSharesTheTurnsBefore) {
  PromptRequest request = Request({.enabled = false}, 60);
  request.sampling.ignore_eos = true;
  Harness harness;
  const Trajectory first = harness.Run(request);
  PromptRequest next = request;
  next.prompt_token_ids.insert(next.prompt_token_ids.end(), first.response_token_ids.begin(),
                               first.response_token_ids.end());
  next.prompt_token_ids.push_back(3);  // 91 tokens
  next.sampling.max_tokens = 5;
  const int64_t before = harness.senior.consumed;
  const Trajectory second = harness.Run(next);
  // The whole block is there, and the begun one: all but the last token of the first response.
  EXPECT_EQ(harness.senior.consumed - before, 2 + 4);
  EXPECT_EQ(harness.Stats().shared_prefix_tokens_total, 89);
  ExpectSame(second, Harness().Run(next));
}

TEST(GeneratorTest, NewWeightsShareNothingWithOldOnes) {
  PromptRequest request = Request({.enabled = false}, 70);
  Harness harness;
  harness.Run(request);
  harness.senior.set_weights(9);
  harness.generator.OnSeniorUpdated({1, "one"}, OnWeightUpdate::kKeep);
  ExpectSame(harness.Run(request), Harness(kWide, 9).Run(request));
  EXPECT_EQ(harness.Stats().shared_prefix_tokens_total, 0);
}

// Random prompts of several streams and priorities that arrive, share prefixes, are cancelled,
// preempted and late, under random limits. With `behind` models run behind the host, two at a time;
// with `ahead` the next author is always known, so that passes are planned ahead.
void ExpectLaw3ForRandomWorkloads(bool behind, bool ahead = false) {
  int64_t ahead_passes = 0;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    SchedulerLimits limits = Limits(1 + below(12), 1 + below(90), 2 + below(7));
    limits.num_blocks[1] = 2 + below(7);
    Harness harness(limits, 1, 2, /*eager_lanes=*/below(4) == 0);
    harness.senior.late = harness.junior.late = behind;
    struct Submitted {
      PromptRequest request;
      std::shared_ptr<RecordingListener> listener;
      absl::StatusCode ends = absl::StatusCode::kOk;
    };
    std::vector<Submitted> all;
    SteadyTime now = SteadyTime();
    int64_t updates = 0;
    for (int64_t i = 0; i < 14; ++i) {
      PromptRequest request = Request(Tandem(kStrategies[below(5)]), 1, 1000 + i);
      // Prompts of one stem begin with the same tokens.
      const PromptRequest stem = Request({}, static_cast<int>(1 + below(85)), below(3));
      request.prompt_token_ids = stem.prompt_token_ids;
      request.tandem.enabled = below(4) > 0;
      if (ahead) {
        request.tandem.selection_strategy = SelectionStrategy::kTurn;
        if (below(3) == 0) request.tandem = Tandem(SelectionStrategy::kChunk);
      }
      request.num_samples = 1 + below(4);
      request.return_other_logprobs = below(2) == 0;
      request.sampling.top_k = static_cast<int32_t>(below(3) * 7);
      request.sampling.max_tokens = static_cast<int32_t>(1 + below(60));
      request.priority = static_cast<int32_t>(below(3)) - 1;
      if (below(3) == 0) request.deadline = now + absl::Seconds(below(9));
      all.push_back({request, harness.Submit(request, /*stream=*/below(3))});
      for (int64_t steps = below(25); steps > 0; --steps) harness.generator.Step();
      if (below(6) == 0) {  // the same weights again, so that the tokens stay
        harness.generator.Settle();
        harness.generator.OnSeniorUpdated(
            {i, below(2) == 0 ? "again" : "zero"},
            below(2) == 0 ? OnWeightUpdate::kRecompute : OnWeightUpdate::kKeep);
        ++updates;
      }
      if (below(5) == 0) {
        const int64_t victim = below(i + 1);
        harness.generator.Settle();  // the victim may have ended
        if (!all[victim].listener->done()) all[victim].ends = absl::StatusCode::kCancelled;
        harness.generator.Fail(victim + 1, absl::CancelledError("enough"));
      }
      now += absl::Seconds(1);
      if (harness.generator.next_deadline() <= now) harness.generator.Settle();
      for (Submitted& one : all) {
        if (one.request.deadline > now || one.listener->done()) continue;
        one.ends = absl::StatusCode::kDeadlineExceeded;
      }
      harness.generator.ExpireDeadlines(now);
    }
    harness.Finish();
    int64_t tokens = 0;
    for (const Submitted& one : all) {
      ASSERT_TRUE(one.listener->done());
      ASSERT_EQ(one.listener->failure().value_or(absl::OkStatus()).code(), one.ends);
      tokens += one.request.num_samples * 100;
      if (one.ends != absl::StatusCode::kOk) continue;
      Harness alone;
      const auto expected = alone.Submit(one.request);
      alone.Finish();
      const auto finished = one.listener->finished();
      ASSERT_EQ(finished.size(), static_cast<size_t>(one.request.num_samples));
      for (const auto& [index, trajectory] : expected->finished()) {
        ExpectSame(finished.at(index), trajectory);
      }
    }
    // A lane consumes a token once, and again after a preemption or an update.
    const int64_t most = tokens + 100 * (harness.Stats().preemptions_total + 12 * updates);
    EXPECT_LE(harness.senior.consumed, most);
    EXPECT_LE(harness.junior.consumed, most);
    EXPECT_LE(harness.senior.passes, harness.senior.consumed);
    EXPECT_LE(harness.junior.passes, harness.junior.consumed);
    ahead_passes += harness.senior.ahead_passes + harness.junior.ahead_passes;
  }
  if (ahead) {
    EXPECT_GT(ahead_passes, 1000);
  }
}

TEST(GeneratorTest, Law3HoldsForRandomWorkloads) { ExpectLaw3ForRandomWorkloads(false); }

TEST(GeneratorTest, Law3HoldsForRandomWorkloadsBehindTheHost) {
  ExpectLaw3ForRandomWorkloads(true);
}

TEST(GeneratorTest, Law3HoldsForRandomWorkloadsPlannedAhead) {
  ExpectLaw3ForRandomWorkloads(true, /*ahead=*/true);
}

// Twelve prompts whose authors change, with models that run behind the host.
TEST(GeneratorTest, BothModelsRunAtTheSameTime) {
  for (const bool behind : {false, true}) {
    Harness harness;
    harness.senior.late = harness.junior.late = behind;
    for (int i = 0; i < 12; ++i) {
      harness.Submit(Request(Tandem(SelectionStrategy::kBernoulli), 5, 100 + i));
    }
    int64_t steps = 0, together = 0;
    for (; harness.generator.HasWork(); ++steps) {
      const int64_t senior = harness.senior.passes, junior = harness.junior.passes;
      harness.generator.Step();
      together += harness.senior.passes > senior && harness.junior.passes > junior;
    }
    EXPECT_EQ(together > steps / 2, behind) << together << " of " << steps;
  }
}

// The samples of a prompt are in both passes: that of a model that fails, and that of the other.
TEST(GeneratorTest, AFailedPassEndsNoPromptThatRunsBesideIt) {
  int64_t failed = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Harness harness;
    harness.senior.late = harness.junior.late = true;
    std::vector<PromptRequest> requests;
    std::vector<std::shared_ptr<RecordingListener>> listeners;
    for (uint64_t i = 0; i < 4; ++i) {
      requests.push_back(Request(Tandem(SelectionStrategy::kBernoulli), 5, 100 * seed + i));
      requests.back().num_samples = 4;
      listeners.push_back(harness.Submit(requests.back()));
    }
    for (uint64_t i = 0; i < 3 + seed % 7; ++i) harness.generator.Step();
    (seed % 2 == 0 ? harness.senior : harness.junior).fail_next = absl::InternalError("broken");
    harness.Finish();
    for (size_t i = 0; i < requests.size(); ++i) {
      if (listeners[i]->failure().has_value()) {
        ++failed;
        EXPECT_EQ(listeners[i]->failure()->message(), "broken");
        continue;
      }
      Harness alone;
      const auto expected = alone.Submit(requests[i]);
      alone.Finish();
      for (const auto& [index, trajectory] : expected->finished()) {
        ExpectSame(listeners[i]->finished().at(index), trajectory);
      }
    }
  }
  EXPECT_GT(failed, 0);
}

TEST(GeneratorTest, CountsWhatHappened) {
  Harness harness;
  const Trajectory t = harness.Run(Request(Tandem(SelectionStrategy::kAlternating)));
  const EngineStats stats = harness.Stats();
  const auto length = static_cast<int64_t>(t.response_token_ids.size());
  EXPECT_EQ(stats.senior_tokens_total, (length + 1) / 2);
  EXPECT_EQ(stats.junior_tokens_total, length / 2);
  EXPECT_EQ(stats.handoffs_total, length - 1);
  // Every token but the last ones was read by the other model.
  EXPECT_EQ(stats.senior_catch_up_tokens_total + stats.junior_catch_up_tokens_total, length - 1);
  EXPECT_EQ(stats.prompt_tokens_total, 5);
  EXPECT_EQ(stats.forward_passes_total, length);
  EXPECT_EQ(stats.sequences_running, 0);
  EXPECT_EQ(stats.senior_kv_tokens, 0);
}

}  // namespace
}  // namespace tandem::rollout
