#include "common/loss/advantages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/base/errors/error.h"

namespace tandem::loss {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

TEST(AdvantagesTest, GroupRelativeUsesSampleStandardDeviation) {
  // Group 7: rewards 1, 0, 0; mean 1/3, std with ddof 1 = sqrt(1/3). Group 9 has one member.
  const auto advantages = GroupRelativeAdvantages({1, 5, 0, 0}, {7, 9, 7, 7}).value();
  const double std = std::sqrt(1.0 / 3.0) + 1e-6;
  EXPECT_THAT(advantages, ElementsAre(DoubleNear((2.0 / 3) / std, 1e-12), 0.0,
                                      DoubleNear((-1.0 / 3) / std, 1e-12),
                                      DoubleNear((-1.0 / 3) / std, 1e-12)));
}

TEST(AdvantagesTest, EqualRewardsGiveZero) {
  EXPECT_THAT(GroupRelativeAdvantages({0.5, 0.5}, {1, 1}).value(), ElementsAre(0.0, 0.0));
}

TEST(AdvantagesTest, WithoutStdIsTheDistanceFromTheMean) {
  EXPECT_THAT(GroupRelativeAdvantages({1, 0, 0, 1}, {1, 1, 1, 1}, RewardStd::kNone).value(),
              ElementsAre(0.5, -0.5, -0.5, 0.5));
}

TEST(AdvantagesTest, TheSpreadOfTheBatchIsOneDivisorForAllGroups) {
  // All rewards: mean 2, squares 4 + 0 + 1 + 1 + 4, std with ddof 1 = sqrt(10 / 4).
  const double divisor = std::sqrt(2.5) + 0.125;
  EXPECT_THAT(
      GroupRelativeAdvantages({0, 2, 1, 3, 4}, {1, 1, 2, 2, 3}, RewardStd::kBatch, 0.125).value(),
      ElementsAre(DoubleNear(-1 / divisor, 1e-15), DoubleNear(1 / divisor, 1e-15),
                  DoubleNear(-1 / divisor, 1e-15), DoubleNear(1 / divisor, 1e-15), 0.0));
  EXPECT_THAT(GroupRelativeAdvantages({1, 1}, {1, 1}, RewardStd::kBatch).value(),
              ElementsAre(0.0, 0.0));
}

TEST(AdvantagesTest, LeaveOneOutComparesWithTheOthers) {
  EXPECT_THAT(LeaveOneOutAdvantages({1, 0, 0, 9}, {1, 1, 1, 2}).value(),
              ElementsAre(1.0, -0.5, -0.5, 0.0));
}

TEST(AdvantagesTest, BadRewardNamesItsIndex) {
  const auto result =
      GroupRelativeAdvantages({1, std::numeric_limits<double>::quiet_NaN()}, {1, 1});
  EXPECT_EQ(FieldPath(result.status()), "rewards[1]");
  EXPECT_EQ(FieldPath(GroupRelativeAdvantages({1, 2}, {1}).status()), "group_ids");
}

TEST(AdvantagesTest, GaeEqualsTheDefinition) {
  const std::vector<double> rewards = {0.1, 0.0, -0.2, 1.0};
  const std::vector<double> values = {0.5, 0.4, 0.3, 0.2, 0.7};
  const GaeOptions options = {.gamma = 0.9, .lambda = 0.8, .bootstrap_truncated = true};
  const auto result = GeneralizedAdvantages(rewards, values, /*truncated=*/true, options).value();
  for (size_t t = 0; t < 4; ++t) {
    double expected = 0, factor = 1;
    for (size_t k = t; k < 4; ++k) {
      expected += factor * (rewards[k] + 0.9 * values[k + 1] - values[k]);
      factor *= 0.9 * 0.8;
    }
    EXPECT_NEAR(result.advantages[t], expected, 1e-12);
    EXPECT_NEAR(result.returns[t], expected + values[t], 1e-12);
  }
}

TEST(AdvantagesTest, GaeBootstrapsOnlyWhenTruncatedAndAsked) {
  const std::vector<double> rewards = {1.0}, values = {0.0, 10.0};
  const auto last = [&](bool truncated, bool bootstrap) {
    return GeneralizedAdvantages(rewards, values, truncated, {.bootstrap_truncated = bootstrap})
        .value()
        .advantages[0];
  };
  EXPECT_EQ(last(false, true), 1.0);
  EXPECT_EQ(last(true, false), 1.0);
  EXPECT_EQ(last(true, true), 11.0);
  EXPECT_FALSE(GeneralizedAdvantages(rewards, {1.0}, false, {}).ok());
}

TEST(AdvantagesTest, WhiteningGivesMeanZeroAndUnitVariance) {
  std::vector<double> a = {1, 2, 3, 10};
  WhitenAdvantages(absl::MakeSpan(a));
  double sum = 0, squares = 0;
  for (double x : a) sum += x, squares += x * x;
  EXPECT_NEAR(sum, 0, 1e-12);
  EXPECT_NEAR(squares / 3, 1, 1e-8);
  std::vector<double> one = {4};
  WhitenAdvantages(absl::MakeSpan(one));
  EXPECT_EQ(one[0], 0);
}

// 0.1 + 0.2 is not 0.3: no estimator makes a gradient of that, whatever it divides by.
TEST(AdvantagesTest, RewardsThatDifferByRoundingAreEqual) {
  const std::vector<int64_t> ids = {0, 0, 0, 1, 1, 1};
  const std::vector<double> rewards = {0.1 + 0.2, 0.3, 0.3, 1e6, 1e6 * (1 + 1e-15), 1e6};
  for (const RewardStd std : {RewardStd::kNone, RewardStd::kGroup, RewardStd::kBatch}) {
    EXPECT_EQ(GroupRelativeAdvantages(rewards, ids, std, /*epsilon=*/1e-12).value(),
              std::vector<double>(6, 0.0));
  }
  EXPECT_EQ(LeaveOneOutAdvantages(rewards, ids).value(), std::vector<double>(6, 0.0));
  // What differs by more is compared.
  for (const double difference : {1e-8, 1e-3}) {
    const auto advantages =
        GroupRelativeAdvantages({0.5, 0.5 + difference}, {0, 0}, RewardStd::kGroup, 1e-12).value();
    EXPECT_NEAR(advantages[1], 1 / std::sqrt(2.0), 1e-3);
    EXPECT_NEAR(LeaveOneOutAdvantages({0.5, 0.5 + difference}, {0, 0}).value()[1], difference,
                1e-12);
  }
}

}  // namespace
}  // namespace tandem::loss
