#include "common/loss/policy_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/base/error.h"

namespace tandem::loss {
namespace {

struct Row {
  double c = 0, e = 0;
  PolicyMetrics metrics;
};

// One token with logp_old = 0 and scale 1.
Row Evaluate(const PolicyLossOptions& options, double logprob, double advantage,
             double reference = 0, double behaviour = 0, double log_keep_mass = 0) {
  const PolicyTokens tokens = {.old_logprobs = {0},
                               .advantages = {advantage},
                               .scales = {1},
                               .reference = {reference},
                               .behaviour = {behaviour},
                               .log_keep_mass = {log_keep_mass},
                               .authorship = {1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, tokens).value();
  Row row;
  const double entropy = 0.5;
  EXPECT_TRUE(evaluator.Evaluate(0, {&logprob, 1}, {&entropy, 1}, {&row.c, 1}, {&row.e, 1}).ok());
  row.metrics = evaluator.Metrics();
  return row;
}

TEST(PolicyLossTest, RatioOneGivesMinusAdvantage) {
  const Row row = Evaluate({}, 0, 2.0);
  EXPECT_DOUBLE_EQ(row.c, -2.0);
  EXPECT_DOUBLE_EQ(row.metrics.loss_policy, -2.0);
  EXPECT_EQ(row.metrics.clip_fraction, 0);
  EXPECT_EQ(row.metrics.ppo_kl, 0);
}

TEST(PolicyLossTest, ClipIsOneSided) {
  const PolicyLossOptions options = {.clip_ratio_low = 0.1, .clip_ratio_high = 0.3};
  // Ratio 1.5: a positive advantage is cut at 1.3, a negative one is not cut.
  const double up = std::log(1.5);
  EXPECT_EQ(Evaluate(options, up, 1).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, up, 1).metrics.loss_policy, -1.3);
  EXPECT_DOUBLE_EQ(Evaluate(options, up, -1).c, 1.5);
  // Ratio 0.5: the other way round, cut at 0.9.
  const double down = std::log(0.5);
  EXPECT_DOUBLE_EQ(Evaluate(options, down, 1).c, -0.5);
  EXPECT_EQ(Evaluate(options, down, -1).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, down, -1).metrics.loss_policy, 0.9);
  EXPECT_EQ(Evaluate(options, down, -1).metrics.clip_fraction, 1);
}

TEST(PolicyLossTest, DualClipBoundsTheLossOfNegativeAdvantages) {
  const PolicyLossOptions options = {.dual_clip = 3};
  EXPECT_DOUBLE_EQ(Evaluate(options, std::log(10.0), -2).metrics.loss_policy, 6);
  EXPECT_EQ(Evaluate(options, std::log(10.0), -2).c, 0);
  EXPECT_DOUBLE_EQ(Evaluate(options, std::log(2.0), -2).c, 4);
}

TEST(PolicyLossTest, LogRatioBeyondTwentyHasNoGradient) {
  const Row row = Evaluate({}, 30, -1);
  EXPECT_EQ(row.c, 0);
  EXPECT_DOUBLE_EQ(row.metrics.loss_policy, std::exp(20.0));
  const PolicyLossOptions k3 = {.kl_estimator = KlEstimator::kK3, .kl_coefficient = 1};
  EXPECT_EQ(Evaluate(k3, -30, 0, /*reference=*/0).c, 0);
}

TEST(PolicyLossTest, KlGradientsMatchDifferences) {
  for (KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    const PolicyLossOptions options = {.kl_estimator = estimator, .kl_coefficient = 0.7};
    const double h = 1e-6;
    const double numeric = (Evaluate(options, 0.3 + h, 0, -0.4).metrics.loss_kl -
                            Evaluate(options, 0.3 - h, 0, -0.4).metrics.loss_kl) /
                           (2 * h);
    EXPECT_NEAR(Evaluate(options, 0.3, 0, -0.4).c, numeric, 1e-8);
  }
  const PolicyLossOptions mixed = {.kl_estimator = KlEstimator::kK3GradientK2, .kl_coefficient = 1};
  EXPECT_DOUBLE_EQ(Evaluate(mixed, 0.3, 0, -0.4).c, 0.7);
}

TEST(PolicyLossTest, EntropyBonusLowersTheLoss) {
  const Row row = Evaluate({.entropy_coefficient = 0.1}, 0, 0);
  EXPECT_DOUBLE_EQ(row.e, -0.1);
  EXPECT_DOUBLE_EQ(row.metrics.loss_entropy, -0.05);
}

TEST(PolicyLossTest, ImportanceWeightIsTruncatedAndConstant) {
  const PolicyLossOptions options = {.importance_sampling_cap = 2};
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, /*behaviour=*/-std::log(1.5)).c, -1.5);
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, /*behaviour=*/-5).c, -2);
}

TEST(PolicyLossTest, ImportanceWeightIsOverWhatWasReallySampledFrom) {
  // Top-k kept 4/5 of the mass: a token of probability 1 / 1.5 was drawn with 1 / 1.2.
  const PolicyLossOptions options = {.importance_sampling_cap = 2};
  EXPECT_DOUBLE_EQ(Evaluate(options, 0, 1, 0, -std::log(1.5), std::log(0.8)).c, -1.2);
}

TEST(PolicyLossTest, MismatchIsSplitByAuthor) {
  const PolicyTokens tokens = {.old_logprobs = {0, 0, 0},
                               .advantages = {0, 0, 0},
                               .scales = {1, 1, 1},
                               .reference = {},
                               .behaviour = {0.5, -1, -1},
                               .log_keep_mass = {},
                               .authorship = {1, 0, 1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, tokens).value();
  double c[3], e[3];
  const double zeros[3] = {0, 0, 0};
  ASSERT_TRUE(evaluator.Evaluate(0, zeros, zeros, absl::MakeSpan(c), absl::MakeSpan(e)).ok());
  const PolicyMetrics metrics = evaluator.Metrics();
  EXPECT_DOUBLE_EQ(metrics.senior_mismatch.k1, -0.25);
  EXPECT_DOUBLE_EQ(metrics.senior_mismatch.max_abs_logprob_diff, 1);
  const double a = std::exp(-0.5), b = std::exp(1.0);
  EXPECT_NEAR(metrics.senior_mismatch.effective_sample_size,
              (a + b) * (a + b) / (2 * (a * a + b * b)), 1e-12);
  EXPECT_DOUBLE_EQ(metrics.junior_mismatch.k1, -1);
  EXPECT_NEAR(metrics.junior_mismatch.k3, std::exp(1.0) - 2, 1e-12);
  EXPECT_EQ(metrics.junior_mismatch.count, 1);
}

TEST(PolicyLossTest, NonFiniteRowIsRefused) {
  const PolicyTokens tokens = {.old_logprobs = {0}, .advantages = {1}, .scales = {1}};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, tokens).value();
  const double nan = std::numeric_limits<double>::quiet_NaN(), zero = 0;
  double c, e;
  EXPECT_EQ(evaluator.Evaluate(0, {&nan, 1}, {&zero, 1}, {&c, 1}, {&e, 1}).code(),
            absl::StatusCode::kInternal);
}

TEST(PolicyLossTest, OptionsFailClosed) {
  EXPECT_EQ(CheckPolicyLossOptions({.kind = PolicyLossKind::kGspo}).code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.dual_clip = 0.5})), "dual_clip");
  EXPECT_EQ(FieldPath(CheckPolicyLossOptions({.clip_ratio_low = -1})), "clip_ratio_low");
  const PolicyTokens tokens = {.old_logprobs = {0}, .advantages = {1}, .scales = {1}};
  EXPECT_EQ(
      FieldPath(PolicyLossEvaluator::Create({.kl_estimator = KlEstimator::kK1}, tokens).status()),
      "reference");
}

}  // namespace
}  // namespace tandem::loss
