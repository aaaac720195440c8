#include "common/coauthoring/tandem_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "common/base/philox.h"

namespace tandem {
namespace {

std::vector<float> RandomLogits(int size, uint32_t seed, float spread = 3.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

struct Reference {
  SampledToken sample;
  // Distance of u from the nearest edge of the chosen token's interval; tiny means rounding
  // decides.
  double margin;
};

// The definition in float64, with a full sort.
Reference ReferenceSample(const std::vector<float>& logits, const SamplingParams& params,
                          double u) {
  const int size = static_cast<int>(logits.size());
  std::vector<double> p(size);
  const double largest = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (int i = 0; i < size; ++i)
    total += p[i] = std::exp((logits[i] - largest) / params.temperature);
  for (double& value : p) value /= total;
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return p[a] > p[b]; });
  if (params.top_k > 0 && params.top_k < size) order.resize(params.top_k);
  if (params.top_p < 1) {
    double left = 0;
    for (const int i : order) left += p[i];
    double sum = 0;
    size_t count = 0;
    while (count < order.size() && sum < params.top_p * left) sum += p[order[count++]];
    order.resize(count);
  }
  const double floor = params.min_p * p[order[0]];
  std::erase_if(order, [&](int i) { return p[i] < floor; });
  std::sort(order.begin(), order.end());
  double kept = 0;
  for (const int i : order) kept += p[i];
  double sum = 0;
  for (const int i : order) {
    if (sum + p[i] > u * kept) {
      return {{i, static_cast<float>(std::log(p[i])), static_cast<float>(std::log(kept))},
              std::min(u * kept - sum, sum + p[i] - u * kept)};
    }
    sum += p[i];
  }
  ADD_FAILURE() << "no token";
  return {};
}

TEST(TandemSamplerTest, AgreesWithTheDefinition) {
  TandemSampler sampler;
  const std::vector<SamplingParams> cases = {
      {},
      {.temperature = 0.7},
      {.temperature = 1.7, .top_k = 20},
      {.top_k = 1},
      {.top_p = 0.9},
      {.top_k = 50, .top_p = 0.8},
      {.min_p = 0.1},
      {.temperature = 0.9, .top_k = 40, .top_p = 0.95, .min_p = 0.05},
      {.top_k = 100000, .top_p = 0.999},
  };
  int compared = 0;
  for (const SamplingParams& params : cases) {
    for (uint32_t row = 0; row < 60; ++row) {
      constexpr size_t kSizes[] = {31, 1777, 5000};  // the last one has three blocks
      const auto logits = RandomLogits(kSizes[row % 3], row);
      const double u = Uniform(1, 2, row, RandomPurpose::kToken);
      const auto result = sampler.Sample(logits, params, u);
      ASSERT_TRUE(result.ok());
      const Reference reference = ReferenceSample(logits, params, u);
      if (reference.margin < 1e-6) continue;
      ++compared;
      EXPECT_EQ(result->token, reference.sample.token);
      EXPECT_NEAR(result->logprob, reference.sample.logprob, 2e-6);
      EXPECT_NEAR(result->log_keep_mass, reference.sample.log_keep_mass, 2e-6);
    }
  }
  EXPECT_GT(compared, 500);
}

TEST(TandemSamplerTest, NoCutKeepsExactlyEverything) {
  TandemSampler sampler;
  const auto logits = RandomLogits(500, 1);
  for (const SamplingParams& params :
       {SamplingParams{}, SamplingParams{.top_k = 500}, SamplingParams{.top_k = 9999}}) {
    EXPECT_EQ(sampler.Sample(logits, params, 0.5)->log_keep_mass, 0.0f);
  }
}

TEST(TandemSamplerTest, GreedyTakesTheLowestIdOfEquals) {
  TandemSampler sampler;
  const std::vector<float> logits = {0, 2, 1, 2};
  const auto result = sampler.Sample(logits, {.temperature = 0, .top_p = 0.1}, 0.99);
  EXPECT_EQ(result->token, 1);
  EXPECT_NEAR(result->logprob, 2 - std::log(1 + std::exp(1.0) + 2 * std::exp(2.0)), 1e-6);
  EXPECT_EQ(result->log_keep_mass, 0.0f);
}

TEST(TandemSamplerTest, EqualLogitsAtTheBorderKeepLowerIds) {
  TandemSampler sampler;
  const std::vector<float> logits(10, 0.25f);
  for (const double u : {0.0, 0.4, 0.7, 0.999999}) {
    EXPECT_EQ(sampler.Sample(logits, {.top_k = 3}, u)->token, static_cast<int>(u * 3));
    // 0.35 is reached by the fourth token.
    EXPECT_EQ(sampler.Sample(logits, {.top_p = 0.35}, u)->token, static_cast<int>(u * 4));
  }
  EXPECT_NEAR(sampler.Sample(logits, {.top_k = 3}, 0.0)->log_keep_mass, std::log(0.3), 1e-6);
}

TEST(TandemSamplerTest, TopPActsOnWhatTopKLeft) {
  TandemSampler sampler;
  // Probabilities 0.4, 0.3, 0.2, 0.1. After top-k 2 they are 4/7 and 3/7: 0.57 < 0.6 <= 1.
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f),
                                     std::log(0.1f)};
  EXPECT_EQ(sampler.Sample(logits, {.top_k = 2, .top_p = 0.6}, 0.99)->token, 1);
  EXPECT_EQ(sampler.Sample(logits, {.top_k = 2, .top_p = 0.5}, 0.99)->token, 0);
}

TEST(TandemSamplerTest, ImpossibleTokensAreNeverDrawn) {
  TandemSampler sampler;
  // The first and the third of four blocks hold no token that can be drawn.
  std::vector<float> logits(7000, -std::numeric_limits<float>::infinity());
  logits[2077] = 1.0f;
  logits[6550] = 1.0f;
  logits[6551] = -200.0f;
  EXPECT_EQ(sampler.Sample(logits, {}, 0.0)->token, 2077);
  EXPECT_EQ(sampler.Sample(logits, {}, 0.5)->token, 6550);
  EXPECT_EQ(sampler.Sample(logits, {}, std::nextafter(1.0, 0.0))->token, 6550);
  EXPECT_EQ(sampler.Sample(logits, {.top_k = 5, .top_p = 0.9}, 0.9999)->token, 6550);
}

TEST(TandemSamplerTest, FrequenciesFollowTheDistribution) {
  TandemSampler sampler;
  const std::vector<float> logits = {std::log(0.5f), std::log(0.2f), std::log(0.3f)};
  std::vector<int> counts(3);
  for (uint32_t t = 0; t < 20000; ++t) {
    ++counts[sampler.Sample(logits, {}, Uniform(9, 0, t, RandomPurpose::kToken))->token];
  }
  EXPECT_NEAR(counts[0] / 20000.0, 0.5, 0.015);
  EXPECT_NEAR(counts[1] / 20000.0, 0.2, 0.015);
}

TEST(TandemSamplerTest, BrokenRowsAreErrors) {
  TandemSampler sampler;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> logits = RandomLogits(100, 4);
    logits[63] = bad;
    EXPECT_EQ(sampler.Sample(logits, {}, 0.5).status().code(), absl::StatusCode::kInternal);
  }
  std::vector<float> none(4, -std::numeric_limits<float>::infinity());
  EXPECT_EQ(sampler.Sample(none, {}, 0.5).status().code(), absl::StatusCode::kInternal);
  // A NaN in a block without any other token.
  none.resize(3000, 1.0f);
  std::fill(none.begin(), none.begin() + 2048, -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(sampler.Sample(none, {}, 0.5).ok());
  none[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(sampler.Sample(none, {}, 0.5).status().code(), absl::StatusCode::kInternal);
}

TEST(TandemSamplerTest, TheLikeliestTokensAreThoseOfASort) {
  std::vector<float> logits = RandomLogits(500, 8);
  logits[400] = logits[20] = logits[30] = 50;  // equal ones: lower ids come first
  logits[7] = -std::numeric_limits<float>::infinity();
  TandemSampler sampler;
  for (const double temperature : {0.0, 0.7}) {
    SamplingParams params;
    params.temperature = temperature;
    params.top_k = 3;  // cuts do not count
    ASSERT_TRUE(sampler.Sample(logits, params, 0.5).ok());
    const std::vector<LikelyToken> top = sampler.Top(logits, 60);
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    ASSERT_EQ(top.size(), 60u);
    EXPECT_EQ(top[0].token, 20);
    EXPECT_EQ(top[2].token, 400);
    for (size_t i = 0; i < top.size(); ++i) {
      EXPECT_EQ(top[i].token, order[i]);
      EXPECT_EQ(top[i].logprob, *TandemSampler().TokenLogProb(logits, temperature, order[i]));
    }
    EXPECT_EQ(sampler.Top(logits, 1000).size(), logits.size());
  }
}

TEST(TandemSamplerTest, TokenLogProbEqualsTheSampledOne) {
  TandemSampler sampler;
  const auto logits = RandomLogits(1000, 8);
  const auto sample = sampler.Sample(logits, {.temperature = 0.6, .top_p = 0.7}, 0.3);
  EXPECT_EQ(*sampler.TokenLogProb(logits, 0.6f, sample->token), sample->logprob);
  EXPECT_EQ(sampler.TokenLogProb(logits, 1.0f, 1000).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem
