#include "common/optim/learning_rate.h"

#include <gtest/gtest.h>

namespace tandem::training {
namespace {

TEST(LearningRateTest, WarmsUpThenFalls) {
  OptimizerOptions options = {};
  options.learning_rate = 1.0;
  options.warmup_steps = 4;
  options.total_steps = 12;
  options.min_learning_rate = 0.2;
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 0), 0.25);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 3), 1.0);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 100), 1.0);
  options.schedule = LearningRateSchedule::kLinear;
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 4), 1.0);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 8), 0.6);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 12), 0.2);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 99), 0.2);
  options.schedule = LearningRateSchedule::kCosine;
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 4), 1.0);
  EXPECT_NEAR(LearningRateAt(options, 8), 0.6, 1e-12);
  EXPECT_DOUBLE_EQ(LearningRateAt(options, 12), 0.2);
}

}  // namespace
}  // namespace tandem::training
