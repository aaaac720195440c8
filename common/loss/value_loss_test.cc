#include "common/loss/value_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tandem::loss {
namespace {

TEST(ValueLossTest, TakesTheLargerOfPlainAndClippedError) {
  // Row 0 is inside the clip. Row 1 moved far towards the return: the clipped error is larger and
  // has no gradient. Row 2 moved far away from it: the plain error is larger.
  const ValueTokens tokens = {
      .returns = {1, 1, 1}, .old_values = {0.1, 0, 0}, .scales = {0.5, 0.25, 0.25}};
  ValueLossEvaluator evaluator = ValueLossEvaluator::Create({.clip = 0.2}, tokens).value();
  const std::vector<double> values = {0.2, 0.9, -0.5};
  std::vector<double> gradients(3);
  ASSERT_TRUE(evaluator.Evaluate(0, values, absl::MakeSpan(gradients)).ok());
  EXPECT_DOUBLE_EQ(gradients[0], 0.5 * -0.8);
  EXPECT_DOUBLE_EQ(gradients[1], 0);
  EXPECT_DOUBLE_EQ(gradients[2], 0.25 * -1.5);
  const ValueMetrics metrics = evaluator.Metrics();
  EXPECT_NEAR(metrics.loss, 0.5 * (0.5 * 0.64 + 0.25 * 0.64 + 0.25 * 2.25), 1e-12);
  EXPECT_DOUBLE_EQ(metrics.clip_fraction, 1.0 / 3);
  EXPECT_DOUBLE_EQ(metrics.explained_variance, 0);
}

TEST(ValueLossTest, ExplainedVarianceOfAPerfectCriticIsOne) {
  const ValueTokens tokens = {.returns = {1, 2}, .old_values = {}, .scales = {0.5, 0.5}};
  ValueLossEvaluator evaluator = ValueLossEvaluator::Create({.clip = 0}, tokens).value();
  std::vector<double> gradients(2);
  ASSERT_TRUE(evaluator.Evaluate(0, {1.0, 2.0}, absl::MakeSpan(gradients)).ok());
  EXPECT_DOUBLE_EQ(evaluator.Metrics().explained_variance, 1);
  EXPECT_DOUBLE_EQ(evaluator.Metrics().loss, 0);
  EXPECT_DOUBLE_EQ(evaluator.Metrics().value_mean, 1.5);
}

TEST(WeightedValueLossTest, ItsDerivativesAreTheWeights) {
  const std::vector<double> weights = {0.5, -2, 0.25};
  WeightedValueLoss loss(weights);
  std::vector<double> gradients(2);
  ASSERT_TRUE(loss.Evaluate(1, {3.0, 4.0}, absl::MakeSpan(gradients)).ok());
  EXPECT_EQ(gradients, (std::vector<double>{-2, 0.25}));
  EXPECT_EQ(loss.loss(), -2 * 3 + 0.25 * 4);
  EXPECT_EQ(loss.mean_value(), 3.5);
  EXPECT_FALSE(loss.Evaluate(0, {std::nan("")}, absl::MakeSpan(gradients).first(1)).ok());
}

ValueMetrics MetricsOf(const ValueTokens& tokens, const std::vector<double>& values) {
  ValueLossEvaluator evaluator = ValueLossEvaluator::Create({.clip = 0}, tokens).value();
  std::vector<double> gradients(values.size());
  EXPECT_TRUE(evaluator.Evaluate(0, values, absl::MakeSpan(gradients)).ok());
  return evaluator.Metrics();
}

TEST(ValueLossTest, ExplainedVarianceOfConstantReturnsIsZero) {
  // The mean of three times 0.1 is not 0.1.
  const ValueTokens tokens = {.returns = {0.1, 0.1, 0.1}, .old_values = {}, .scales = {1, 1, 1}};
  EXPECT_EQ(MetricsOf(tokens, {0.2, 0.3, 0.4}).explained_variance, 0);
}

TEST(ValueLossTest, ExplainedVarianceKeepsItsDigitsFarFromZero) {
  // The numbers have few bits: adding 2^40 loses none of them and leaves a variance as it is.
  constexpr double kFar = 1099511627776.0;
  ValueTokens near = {
      .returns = {0.5, -1.25, 2, 0.75}, .old_values = {0.25, -1, 1.5, 0.5}, .scales = {1, 1, 1, 1}};
  const std::vector<double> values = {0.75, -0.5, 1.25, 0.5};
  ValueTokens far = near;
  for (double& x : far.returns) x += kFar;
  const double expected = 1.0 - 0.3125 / 1.34375;  // var(R - v) / var(R)
  EXPECT_NEAR(MetricsOf(near, values).explained_variance, expected, 1e-12);
  EXPECT_NEAR(MetricsOf(far, values).explained_variance, expected, 1e-12);
}

TEST(ValueLossTest, ClipNeedsOldValues) {
  const ValueTokens tokens = {.returns = {1}, .old_values = {}, .scales = {1}};
  EXPECT_FALSE(ValueLossEvaluator::Create({.clip = 0.2}, tokens).ok());
}

}  // namespace
}  // namespace tandem::loss
