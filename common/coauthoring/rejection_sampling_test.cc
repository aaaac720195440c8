// Rejection sampling of drafts: tokens are distributed as without drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/base/philox.h"
#include "common/base/testing/chi_square.h"
#include "common/coauthoring/tandem_sampler.h"

namespace tandem {
namespace {

using Distribution = std::vector<double>;

constexpr int kVocabulary = 12;
constexpr uint32_t kDraws = 50'000;

std::vector<float> RandomLogits(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.2f);
  std::vector<float> logits(kVocabulary);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

// The distribution that temperature and cuts leave, in float64 and with a full sort.
Distribution Probabilities(const std::vector<float>& logits, const SamplingParams& params) {
  Distribution p;
  for (const float logit : logits) p.push_back(std::exp(logit / params.temperature));
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return p[a] > p[b]; });
  const auto keep = [&](size_t count) {
    while (order.size() > count) {
      p[order.back()] = 0;
      order.pop_back();
    }
  };
  const auto sum = [&] { return std::accumulate(p.begin(), p.end(), 0.0); };
  if (params.top_k > 0) keep(static_cast<size_t>(params.top_k));
  const double goal = params.top_p * sum();
  size_t count = 0;
  for (double mass = 0; count < order.size() && mass < goal;) mass += p[order[count++]];
  keep(count);
  while (p[order.back()] < params.min_p * p[order.front()]) keep(order.size() - 1);
  const double left = sum();
  for (double& value : p) value /= left;
  return p;
}

int32_t Invert(const Distribution& p, double u) {
  double target = u * std::accumulate(p.begin(), p.end(), 0.0);
  int32_t last = 0;
  for (int32_t id = 0; id < std::ssize(p); ++id) {
    if (p[id] == 0) continue;
    last = id;
    if ((target -= p[id]) < 0) break;
  }
  return last;
}

// The random numbers of a draw.
struct Numbers {
  explicit Numbers(uint32_t t)
      : draft(Uniform(3, 0, t, RandomPurpose::kDraft)),
        accept(Uniform(3, 0, t, RandomPurpose::kAccept)),
        residual(Uniform(3, 0, t, RandomPurpose::kResidual)) {}
  double draft, accept, residual;
};

// Draws kDraws tokens, and returns how many standard deviations their counts are away from `p`.
double SigmasOf(const Distribution& p, const std::function<int32_t(const Numbers&)>& draw) {
  std::vector<int64_t> counts(p.size());
  for (uint32_t t = 0; t < kDraws; ++t) ++counts[draw(Numbers(t))];
  return ChiSquareSigmas(counts, p);
}

// A target and a draft model, which is like it.
struct Case {
  std::vector<float> target, draft;
  SamplingParams params;
  Distribution p() const { return Probabilities(target, params); }
  Distribution q() const { return Probabilities(draft, params); }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  uint32_t seed = 0;
  for (const SamplingParams& params :
       {SamplingParams{}, SamplingParams{.temperature = 0.6}, SamplingParams{.top_k = 5},
        SamplingParams{.top_p = 0.8}, SamplingParams{.min_p = 0.2},
        SamplingParams{.temperature = 1.5, .top_k = 8, .top_p = 0.9, .min_p = 0.1}}) {
    const std::vector<float> target = RandomLogits(++seed);
    std::vector<float> draft = RandomLogits(100 + seed);
    for (int id = 0; id < kVocabulary; ++id) draft[id] = target[id] + 0.7f * draft[id];
    cases.push_back({target, draft, params});
  }
  return cases;
}

std::string Name(const SamplingParams& params) {
  return testing::PrintToString(
      std::vector<double>{params.temperature, double(params.top_k), params.top_p, params.min_p});
}

TEST(RejectionSamplingTest, DrawnDraftsKeepTheDistribution) {
  TandemSampler sampler;
  for (const Case& one : Cases()) {
    const Distribution p = one.p(), q = one.q();
    int64_t accepted = 0;
    std::vector<float> distribution;
    const auto draw = [&](const Numbers& u) {
      const int32_t draft =
          sampler.Sample(one.draft, one.params, u.draft, {}, &distribution)->token;
      const int32_t token =
          sampler
              .Sample(one.target, one.params, /*u=*/0, {draft, distribution, u.accept, u.residual})
              ->token;
      accepted += token == draft;
      return token;
    };
    EXPECT_LT(SigmasOf(p, draw), kSigmas) << Name(one.params);
    double expected = 0;
    for (int id = 0; id < kVocabulary; ++id) expected += std::min(p[id], q[id]);
    const double deviation = std::sqrt(kDraws * expected * (1 - expected));
    EXPECT_NEAR(static_cast<double>(accepted), kDraws * expected, kSigmas * deviation)
        << Name(one.params);
  }
}

TEST(RejectionSamplingTest, DraftsThatWereNotDrawnKeepTheDistribution) {
  TandemSampler sampler;
  for (const Case& one : Cases()) {
    const Distribution p = one.p();
    for (int32_t draft = 0; draft < kVocabulary; draft += 3) {
      int64_t accepted = 0;
      const auto draw = [&](const Numbers& u) {
        const DraftProposal proposal = {draft, {}, u.accept, u.residual};
        const int32_t token = sampler.Sample(one.target, one.params, /*u=*/0, proposal)->token;
        accepted += token == draft;
        return token;
      };
      EXPECT_LT(SigmasOf(p, draw), kSigmas) << Name(one.params) << " " << draft;
      EXPECT_NEAR(static_cast<double>(accepted), kDraws * p[draft],
                  kSigmas * std::sqrt(kDraws * p[draft] * (1 - p[draft])));
    }
  }
}

// The rule in float64, with an acceptance probability and a residual of the test's choice.
int32_t Apply(const Distribution& p, const Distribution& q, const Numbers& u,
              const std::function<double(double, double)>& acceptance, double subtracted) {
  const int32_t draft = Invert(q, u.draft);
  if (u.accept < acceptance(p[draft], q[draft])) return draft;
  Distribution residual;
  for (size_t id = 0; id < p.size(); ++id) {
    residual.push_back(std::max(0.0, p[id] - subtracted * q[id]));
  }
  return Invert(residual, u.residual);
}

TEST(RejectionSamplingTest, TheGateRefusesWrongRules) {
  const auto ratio = [](double p, double q) { return std::min(1.0, p / q); };
  for (const Case& one : Cases()) {
    const Distribution p = one.p(), q = one.q();
    const auto sigmas = [&](const auto& acceptance, double subtracted) {
      return SigmasOf(p, [&](const Numbers& u) { return Apply(p, q, u, acceptance, subtracted); });
    };
    EXPECT_LT(sigmas(ratio, 1), kSigmas) << "the right rule";
    EXPECT_GT(sigmas(ratio, 0), kSigmas) << "a rejected draft is replaced from p";
    EXPECT_GT(sigmas([](double p, double q) { return p > q ? 1.0 : 0.0; }, 1), kSigmas)
        << "a draft is accepted if it is the likelier one";
    EXPECT_GT(sigmas([](double p, double /*q*/) { return p; }, 1), kSigmas) << "q is left out";
  }
}

TEST(RejectionSamplingTest, TheGateRefusesNumbersThatAreNotIndependent) {
  TandemSampler sampler;
  const Case one = Cases()[0];
  std::vector<float> distribution;
  const auto sigmas = [&](auto accept, auto residual) {
    return SigmasOf(one.p(), [&](const Numbers& u) {
      const int32_t draft =
          sampler.Sample(one.draft, one.params, u.draft, {}, &distribution)->token;
      const DraftProposal proposal = {draft, distribution, u.*accept, u.*residual};
      return sampler.Sample(one.target, one.params, /*u=*/0, proposal)->token;
    });
  };
  EXPECT_LT(sigmas(&Numbers::accept, &Numbers::residual), kSigmas);
  EXPECT_GT(sigmas(&Numbers::draft, &Numbers::residual), kSigmas);
  EXPECT_GT(sigmas(&Numbers::accept, &Numbers::accept), kSigmas);
  EXPECT_GT(sigmas(&Numbers::accept, &Numbers::draft), kSigmas);
}

TEST(RejectionSamplingTest, TheDistributionIsWhatTheCutsLeave) {
  TandemSampler sampler;
  for (const Case& one : Cases()) {
    std::vector<float> distribution = {7.0f};
    const SampledToken sampled = *sampler.Sample(one.target, one.params, 0.4, {}, &distribution);
    const SampledToken plain = *sampler.Sample(one.target, one.params, 0.4);
    EXPECT_EQ(sampled.token, plain.token);
    EXPECT_EQ(sampled.logprob, plain.logprob);
    const Distribution p = one.p();
    ASSERT_EQ(distribution.size(), p.size());
    for (int id = 0; id < kVocabulary; ++id) {
      EXPECT_NEAR(distribution[id], p[id], 1e-6);
      EXPECT_EQ(distribution[id] == 0, p[id] == 0);
    }
  }
}

TEST(RejectionSamplingTest, LogProbabilitiesAreThoseOfTheRow) {
  TandemSampler sampler;
  const SamplingParams params = {.temperature = 0.8, .top_k = 6};
  const std::vector<float> logits = RandomLogits(5);
  const SampledToken plain = *sampler.Sample(logits, params, 0.3);
  for (const double accept_u : {0.0, 0.9999}) {
    const DraftProposal draft = {plain.token, {}, accept_u, 0.6};
    const SampledToken token = *sampler.Sample(logits, params, 0.3, draft);
    EXPECT_EQ(token.token == plain.token, accept_u == 0.0);
    EXPECT_EQ(token.logprob, *sampler.TokenLogProb(logits, 0.8, token.token));
    EXPECT_EQ(token.log_keep_mass, plain.log_keep_mass);
  }
}

TEST(RejectionSamplingTest, AModelAcceptsItsOwnDrafts) {
  TandemSampler sampler;
  const std::vector<float> logits = RandomLogits(6);
  const double below_one = std::nextafter(1.0, 0.0);
  std::vector<float> distribution;
  for (uint32_t t = 0; t < 2000; ++t) {
    const Numbers u(t);
    const int32_t draft = sampler.Sample(logits, {}, u.draft, {}, &distribution)->token;
    const DraftProposal proposal = {draft, distribution, u.accept, u.residual};
    EXPECT_EQ(sampler.Sample(logits, {}, 0, proposal)->token, draft);
    // Rounding may reject it, and leaves a token all the same.
    const DraftProposal barely = {draft, distribution, below_one, below_one};
    EXPECT_TRUE(sampler.Sample(logits, {}, 0, barely).ok());
  }
}

TEST(RejectionSamplingTest, WhatCannotBeDrawnIsNeverAccepted) {
  TandemSampler sampler;
  const std::vector<float> logits = {1.0f, -std::numeric_limits<float>::infinity(), 0.5f, -3.0f};
  EXPECT_NE(sampler.Sample(logits, {}, 0, {1, {}, 0.0, 0.5})->token, 1);
  EXPECT_NE(sampler.Sample(logits, {.top_k = 2}, 0, {3, {}, 0.0, 0.5})->token, 3);
  const std::vector<float> q = {0.0f, 1.0f, 0.0f, 0.0f};
  EXPECT_NE(sampler.Sample(logits, {}, 0, {1, q, 0.0, 0.5})->token, 1);
  // Nothing else can be drawn.
  EXPECT_EQ(sampler.Sample(logits, {.top_k = 1}, 0, {0, {}, 0.9999, 0.5})->token, 0);
}

TEST(RejectionSamplingTest, GreedyDoesNotReadTheDraft) {
  TandemSampler sampler;
  const std::vector<float> logits = RandomLogits(7);
  const SamplingParams greedy = {.temperature = 0};
  const SampledToken plain = *sampler.Sample(logits, greedy, 0.5);
  for (int32_t draft = 0; draft < kVocabulary; ++draft) {
    const SampledToken token = *sampler.Sample(logits, greedy, 0.5, {draft, {}, 0.0, 0.0});
    EXPECT_EQ(token.token, plain.token);
    EXPECT_EQ(token.logprob, plain.logprob);
  }
}

TEST(RejectionSamplingTest, DraftsThatDoNotFitAreRefused) {
  TandemSampler sampler;
  const std::vector<float> logits = RandomLogits(8), short_q(kVocabulary - 1, 0.1f);
  for (const DraftProposal& draft :
       {DraftProposal{kVocabulary, {}, 0, 0}, DraftProposal{-2, {}, 0, 0},
        DraftProposal{3, short_q, 0, 0}}) {
    EXPECT_EQ(sampler.Sample(logits, {}, 0.5, draft).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace tandem
