#include "common/loss/rollout_correction.h"

#include <gtest/gtest.h>

#include <cmath>

#include "common/base/errors/error.h"

namespace tandem::loss {
namespace {

using Kept = std::vector<uint8_t>;

// Two sequences of three and two rows, and an empty one between them. d = old - (behaviour - keep).
PolicyTokens Tokens() {
  const std::vector<double> d = {0.1, -0.5, 1.2, 0.3, -0.2};
  PolicyTokens tokens;
  for (size_t row = 0; row < d.size(); ++row) {
    tokens.behaviour.push_back(-1.0 - static_cast<double>(row));
    tokens.log_keep_mass.push_back(-0.25);
    tokens.old_logprobs.push_back(tokens.behaviour[row] + 0.25 + d[row]);
  }
  tokens.sequence_rows = {3, 0, 2};
  return tokens;
}

TEST(RolloutCorrectionTest, TokensAreKeptByTheirOwnStatistic) {
  const PolicyTokens tokens = Tokens();
  // k1 = -d: exp(-d) is 0.90, 1.65, 0.30, 0.74, 1.22.
  EXPECT_EQ(KeptRows({.upper = 1.5, .lower = 0.5}, tokens), (Kept{1, 0, 0, 1, 1}));
  EXPECT_EQ(KeptRows({.upper = 1.5}, tokens), (Kept{1, 0, 1, 1, 1}));
  // d^2 / 2: 0.005, 0.125, 0.72, 0.045, 0.02.
  EXPECT_EQ(KeptRows({.estimator = KlEstimator::kK2, .upper = 0.1}, tokens), (Kept{1, 0, 0, 1, 1}));
  // exp(d) - d - 1: 0.005, 0.107, 1.120, 0.050, 0.019.
  EXPECT_EQ(KeptRows({.estimator = KlEstimator::kK3, .upper = 0.11}, tokens),
            (Kept{1, 1, 0, 1, 1}));
}

TEST(RolloutCorrectionTest, SequencesAreKeptAsAWhole) {
  const PolicyTokens tokens = Tokens();
  const auto kept = [&](RejectionLevel level, KlEstimator estimator, double upper,
                        double lower = 0) {
    return KeptRows({.level = level, .estimator = estimator, .upper = upper, .lower = lower},
                    tokens);
  };
  const Kept first = {1, 1, 1, 0, 0}, second = {0, 0, 0, 1, 1};
  // Sums of k1: -0.8 and -0.1.
  EXPECT_EQ(kept(RejectionLevel::kSequenceSum, KlEstimator::kK1, 2, 0.5), second);
  EXPECT_EQ(kept(RejectionLevel::kSequenceSum, KlEstimator::kK1, 0.8), first);
  // Means: -0.267 and -0.05.
  EXPECT_EQ(kept(RejectionLevel::kSequenceMean, KlEstimator::kK1, 2, 0.8), second);
  EXPECT_EQ(kept(RejectionLevel::kSequenceMean, KlEstimator::kK1, 2, 0.7), (Kept{1, 1, 1, 1, 1}));
  // k2: sums 0.85 and 0.065, means 0.283 and 0.0325, largest 0.72 and 0.045.
  EXPECT_EQ(kept(RejectionLevel::kSequenceSum, KlEstimator::kK2, 0.84), second);
  EXPECT_EQ(kept(RejectionLevel::kSequenceMean, KlEstimator::kK2, 0.28), second);
  EXPECT_EQ(kept(RejectionLevel::kSequenceMax, KlEstimator::kK2, 0.71), second);
  EXPECT_EQ(kept(RejectionLevel::kSequenceMax, KlEstimator::kK2, 0.73), (Kept{1, 1, 1, 1, 1}));
}

TEST(RolloutCorrectionTest, InvalidOptionsAreRefusedByName) {
  const auto path = [](const RejectionOptions& options) {
    return FieldPath(CheckRejectionOptions(options)).value_or("");
  };
  EXPECT_TRUE(CheckRejectionOptions({}).ok());
  EXPECT_TRUE(CheckRejectionOptions({.upper = 2, .lower = 0.5}).ok());
  EXPECT_EQ(path({.upper = -1}), "rejection_upper");
  EXPECT_EQ(path({.upper = NAN}), "rejection_upper");
  EXPECT_EQ(path({.upper = 1, .lower = 2}), "rejection_lower");
  EXPECT_EQ(path({.lower = 0.5}), "rejection_lower");
  EXPECT_EQ(path({.estimator = KlEstimator::kK2, .upper = 1, .lower = 0.5}), "rejection_lower");
  EXPECT_EQ(path({.estimator = KlEstimator::kK3GradientK2, .upper = 1}), "rejection_estimator");
  EXPECT_EQ(path({.level = RejectionLevel::kSequenceMax, .upper = 1}), "rejection_estimator");
}

TEST(RolloutCorrectionTest, WeightsCanBeNormalizedOverTokensOrSequences) {
  const PolicyTokens tokens = Tokens();
  PolicyLossOptions options{.importance_sampling_cap = 2};
  const auto expect = [&](bool normalize, double mean, const std::vector<double>& expected) {
    const std::vector<double> weights = ImportanceWeights(options, tokens, normalize);
    ASSERT_EQ(weights.size(), expected.size());
    for (size_t row = 0; row < weights.size(); ++row) {
      EXPECT_NEAR(weights[row], expected[row] / mean, 1e-12) << row;
    }
  };
  const std::vector<double> each = {std::exp(0.1), std::exp(-0.5), 2, std::exp(0.3),
                                    std::exp(-0.2)};
  expect(false, 1, each);
  expect(true, (each[0] + each[1] + each[2] + each[3] + each[4]) / 5, each);
  options.importance_sampling_level = ImportanceSamplingLevel::kSequence;
  const double second = std::exp(0.1);
  expect(false, 1, {2, 2, 2, second, second});
  expect(true, (2 + second) / 2, {2, 2, 2, second, second});
  EXPECT_TRUE(ImportanceWeights(options, {}, true).empty());
}

TEST(RolloutCorrectionTest, TheEvaluatorTakesGivenWeights) {
  PolicyTokens tokens = Tokens();
  tokens.advantages = tokens.scales = std::vector<double>(5, 1.0);
  tokens.authorship.assign(5, 1);
  tokens.importance_weights = {1, 2, 3, 4, 0};
  const PolicyLossOptions options{.importance_sampling_cap = 2,
                                  .importance_sampling_level = ImportanceSamplingLevel::kSequence};
  auto evaluator = PolicyLossEvaluator::Create(options, tokens).value();
  EXPECT_FALSE(evaluator.needs_sequences());
  std::vector<double> c(5), e(5);
  const std::vector<double> entropies(5, 0.0);
  ASSERT_TRUE(
      evaluator.Evaluate(0, tokens.old_logprobs, entropies, absl::MakeSpan(c), absl::MakeSpan(e))
          .ok());
  EXPECT_EQ(c, (std::vector<double>{-1, -2, -3, -4, 0}));
  EXPECT_EQ(evaluator.Metrics().masked_fraction, 0.2);
  tokens.importance_weights.pop_back();
  EXPECT_EQ(FieldPath(PolicyLossEvaluator::Create(options, tokens).status()), "importance_weights");
}

}  // namespace
}  // namespace tandem::loss
