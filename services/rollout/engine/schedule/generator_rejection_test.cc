// Drafts by rejection sampling: responses differ from those without drafts, and have the same
// distribution.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <span>

#include "common/base/testing/chi_square.h"
#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/testing/generator_harness.h"

namespace tandem::rollout {
namespace {

constexpr auto kNgram = SpeculativeMethod::kNgram;
constexpr auto kJunior = SpeculativeMethod::kJunior;
constexpr auto kOfHeads = SpeculativeMethod::kHeads;

// The queue of one prompt with all samples would be long.
constexpr uint64_t kPrompts = 20;
constexpr int64_t kSamples = 2'000;
constexpr int kTokens = 3;
constexpr int kClasses = 8;

// The classes of a response's tokens; 0 behind its end.
size_t Cell(std::span<const int32_t> response) {
  size_t cell = 0;
  for (int i = 0; i < kTokens; ++i) {
    const bool written = i < std::ssize(response);
    cell = cell * (kClasses + 1) + (written ? 1 + response[i] % kClasses : 0);
  }
  return cell;
}

size_t NumCells() { return static_cast<size_t>(std::pow(kClasses + 1, kTokens)); }

// Proposes the same tokens again and again.
class StubbornDrafter final : public Drafter {
 public:
  explicit StubbornDrafter(std::span<const int32_t> drafts) : drafts_(drafts) {}
  void Propose(std::span<const int32_t> /*tokens*/, int64_t most,
               std::vector<int32_t>& drafts) override {
    const auto some = drafts_.first(std::min<size_t>(most, drafts_.size()));
    drafts.assign(some.begin(), some.end());
  }

 private:
  const std::span<const int32_t> drafts_;
};

PromptRequest WithRejection(PromptRequest request, SpeculativeMethod method, int64_t most = 5) {
  request.speculative = {.method = method,
                         .num_speculative_tokens = most,
                         .acceptance_rule = AcceptanceRule::kRejectionSampling};
  return request;
}

// A prompt whose responses end with a third of the tokens.
PromptRequest ManySamples(const TandemConfig& tandem, int prompt_length = 5) {
  PromptRequest request = Request(tandem, prompt_length, 3);
  request.num_samples = kSamples;
  request.sampling.max_tokens = kTokens;
  request.sampling.stop_token_ids = {15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26};
  return request;
}

// The distribution of a token after temperature and top-p, in float64.
std::vector<double> Probabilities(const std::vector<float>& logits,
                                  const SamplingParams& sampling) {
  std::map<double, size_t, std::greater<>> order;
  double total = 0;
  for (size_t id = 0; id < logits.size(); ++id) {
    // Equal logits in the order of their ids.
    const double weight = std::exp(logits[id] / sampling.temperature) * (1 - 1e-12 * id);
    order.emplace(weight, id);
    total += weight;
  }
  std::vector<double> p(logits.size());
  double kept = 0;
  for (const auto& [weight, id] : order) {
    if (kept >= sampling.top_p * total) break;
    p[id] = weight;
    kept += weight;
  }
  for (double& value : p) value /= kept;
  return p;
}

// The probabilities of the cells, of all responses to the prompt.
class Enumeration {
 public:
  Enumeration(const Harness& harness, const PromptRequest& request)
      : harness_(harness), request_(request), cells_(NumCells()) {
    const auto boundaries =
        std::make_shared<const TokenSet>(std::span(request.tandem.boundary_token_ids));
    Extend({}, 1.0, AuthorSelector(request.tandem, request.seed, 0, boundaries));
  }

  const std::vector<double>& cells() const { return cells_; }

 private:
  void Extend(std::vector<int32_t> response, double probability, const AuthorSelector& selector) {
    const auto is_stop = [&](int32_t token) {
      return token == kEos || std::ranges::count(request_.sampling.stop_token_ids, token) > 0;
    };
    if (response.size() == kTokens || (!response.empty() && is_stop(response.back()))) {
      cells_[Cell(response)] += probability;
      return;
    }
    std::vector<int32_t> text = request_.prompt_token_ids;
    text.insert(text.end(), response.begin(), response.end());
    const bool senior = selector.NextAuthor() == Author::kSenior;
    const std::vector<double> p =
        Probabilities((senior ? harness_.senior : harness_.junior).Logits(text), request_.sampling);
    response.push_back(0);
    for (int32_t token = 0; token < kVocab; ++token) {
      if (p[token] == 0) continue;
      response.back() = token;
      AuthorSelector after = selector;
      after.OnToken(token);
      Extend(response, probability * p[token], after);
    }
  }

  const Harness& harness_;
  const PromptRequest& request_;
  std::vector<double> cells_;
};

// Generates the responses to the request with kPrompts seeds, and counts them by their cells.
std::vector<int64_t> CountCells(Harness& harness, PromptRequest request) {
  std::vector<int64_t> counts(NumCells());
  for (request.seed = 0; request.seed < kPrompts; ++request.seed) {
    const auto listener = harness.Submit(request);
    harness.Finish();
    for (const auto& [index, trajectory] : listener->finished()) {
      ++counts[Cell(trajectory.response_token_ids)];
    }
  }
  return counts;
}

// Returns by how many standard deviations the responses of `harness` to `request` deviate from the
// distribution by its models.
double Sigmas(Harness& harness, const PromptRequest& request) {
  return ChiSquareSigmas(CountCells(harness, request), Enumeration(harness, request).cells());
}

struct Mode {
  TandemConfig tandem;
  double temperature = 1.0;
  double top_p = 1.0;
  bool eager_lanes = false;  // and log-probs of the other model
};

// Author changes do not depend on the sample.
std::vector<Mode> Modes() {
  TandemConfig chunk = Tandem(SelectionStrategy::kChunk);
  chunk.chunk_size = 2;
  TandemConfig sentence = Tandem(SelectionStrategy::kSentence);
  sentence.boundary_token_ids = {10, 11, 12, 13, 14, 0, 1, 2, 3};
  return {{.tandem = {.enabled = false}},
          {.tandem = {.enabled = false}, .temperature = 1.3, .top_p = 0.8},
          {.tandem = chunk},
          {.tandem = sentence},
          {.tandem = sentence, .temperature = 0.8, .top_p = 0.7},
          {.tandem = sentence, .temperature = 1.2, .eager_lanes = true}};
}

class GeneratorRejectionTest : public ::testing::TestWithParam<SpeculativeMethod> {
 protected:
  // One sequence runs at a time, since drafts are cut where many run. The n-grams are three fixed
  // tokens; the second one begins another sentence.
  static Harness MakeHarness(SchedulerLimits limits, bool eager_lanes = false) {
    static constexpr int32_t kDrafts[] = {30, 2, 31};
    return Harness(limits, 1, 2, eager_lanes, [](const SpeculativeParams& params) {
      return params.method == kNgram ? std::make_unique<StubbornDrafter>(kDrafts) : nullptr;
    });
  }
  static DraftCounts Counts(const Harness& harness) {
    const EngineStats stats = harness.Stats();
    if (GetParam() == kNgram) return stats.ngram_drafts_total.Sum();
    return (GetParam() == kJunior ? stats.junior_drafts_total : stats.heads_drafts_total).Sum();
  }
};

TEST_P(GeneratorRejectionTest, ResponsesHaveTheDistributionOfThoseWithoutDrafts) {
  DraftCounts counts;
  for (const Mode& mode : Modes()) {
    PromptRequest request = WithRejection(ManySamples(mode.tandem), GetParam());
    request.sampling.temperature = mode.temperature;
    request.sampling.top_p = mode.top_p;
    request.return_other_logprobs = mode.eager_lanes;
    Harness harness = MakeHarness(Limits(1), mode.eager_lanes);
    harness.senior.keep_rows = true;
    EXPECT_LT(Sigmas(harness, request), kSigmas);
    const DraftCounts added = Counts(harness);
    counts.drafted += added.drafted;
    counts.accepted += added.accepted;
  }
  EXPECT_GT(counts.accepted, 1000);
  EXPECT_GT(counts.drafted, counts.accepted + 1000);
}

TEST_P(GeneratorRejectionTest, PreemptionKeepsTheDistribution) {
  // Each of two sequences needs both blocks of a lane for its last tokens.
  PromptRequest request =
      WithRejection(ManySamples({.enabled = false}, kKvBlockTokens - 1), GetParam());
  Harness harness = MakeHarness(Limits(2, kWide.max_batched_tokens, 2));
  harness.senior.keep_rows = true;
  EXPECT_LT(Sigmas(harness, request), kSigmas);
  EXPECT_GT(harness.Stats().preemptions_total, 1000);
}

TEST_P(GeneratorRejectionTest, GreedyResponsesHaveTheBitsOfTheExactRule) {
  for (const auto strategy : kStrategies) {
    PromptRequest request = Request(Tandem(strategy, 0.8), 6, 5);
    request.sampling.temperature = 0.0;
    request.return_other_logprobs = true;
    PromptRequest exact = request, rejection = WithRejection(request, GetParam());
    exact.speculative.method = GetParam();
    Harness plain, one, other;
    one.senior.keep_rows = other.senior.keep_rows = true;
    const Trajectory expected = plain.Run(request);
    ExpectSame(one.Run(exact), expected);
    ExpectSame(other.Run(rejection), expected);
    EXPECT_EQ(one.senior.passes, other.senior.passes);
    EXPECT_EQ(one.junior.passes, other.junior.passes);
  }
}

TEST_P(GeneratorRejectionTest, ARepetitionWritesTheSame) {
  for (const auto strategy : kStrategies) {
    PromptRequest request = WithRejection(Request(Tandem(strategy, 0.8), 6, 5), GetParam());
    request.return_other_logprobs = true;
    Harness one = MakeHarness(kWide), other = MakeHarness(kWide);
    one.senior.keep_rows = other.senior.keep_rows = true;
    ExpectSame(one.Run(request), other.Run(request));
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, GeneratorRejectionTest,
                         ::testing::Values(kNgram, kJunior, kOfHeads));

TEST(GeneratorRejectionTest, LogProbabilitiesAreTheModelsOwn) {
  PromptRequest request =
      WithRejection(Request(Tandem(SelectionStrategy::kSentence), 6, 5), kJunior);
  request.return_other_logprobs = true;
  request.sampling.temperature = 0.9;
  request.sampling.top_p = 0.8;
  Harness harness;
  const Trajectory t = harness.Run(request);
  std::vector<int32_t> text = t.prompt_token_ids;
  TandemSampler sampler;
  for (size_t i = 0; i < t.response_token_ids.size(); ++i) {
    const bool senior = t.authorship_mask[i] == Author::kSenior;
    const FakeRunner& author = senior ? harness.senior : harness.junior;
    const FakeRunner& other = senior ? harness.junior : harness.senior;
    const int32_t token = t.response_token_ids[i];
    EXPECT_EQ(t.author_logprobs[i], *sampler.TokenLogProb(author.Logits(text), 0.9, token));
    EXPECT_EQ(t.other_logprobs[i], *sampler.TokenLogProb(other.Logits(text), 0.9, token));
    EXPECT_EQ(t.log_keep_mass[i],
              sampler.Sample(author.Logits(text), request.sampling, 0.5)->log_keep_mass);
    text.push_back(token);
  }
}

TEST(GeneratorRejectionTest, AJuniorThatIsTheSeniorWritesDraftsThatAreAllAccepted) {
  PromptRequest request = Request({.enabled = false}, 6, 5);
  request.sampling.temperature = 0.7;
  request.sampling.top_k = 10;
  request.sampling.ignore_eos = true;
  Harness harness(kWide, 7, 7);
  harness.Run(WithRejection(request, kJunior));
  EXPECT_EQ(harness.Stats().junior_drafts_total.Sum(),
            (DraftCounts{.drafted = 25, .accepted = 25}));
  EXPECT_EQ(harness.senior.passes, 5);
}

// The reason to choose the rule: of a sampled draft more are accepted than would equal the draw.
TEST(GeneratorRejectionTest, MoreDraftsOfTheJuniorAreAcceptedThanByTheExactRule) {
  PromptRequest request = ManySamples({.enabled = false});
  const auto accepted = [&](AcceptanceRule rule) {
    Harness harness(Limits(1));
    request.speculative = {.method = kJunior, .acceptance_rule = rule};
    CountCells(harness, request);
    const DraftCounts counts = harness.Stats().junior_drafts_total.Sum();
    return static_cast<double>(counts.accepted) / static_cast<double>(counts.drafted);
  };
  EXPECT_GT(accepted(AcceptanceRule::kRejectionSampling), accepted(AcceptanceRule::kExact) + 0.1);
}

}  // namespace
}  // namespace tandem::rollout
