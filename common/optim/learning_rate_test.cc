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

TEST(OptimizerOverridesTest, WhatIsNotSetStaysAsConfigured) {
  OptimizerOptions options = {.learning_rate = 1,
                              .beta1 = 0.1,
                              .beta2 = 0.2,
                              .epsilon = 0.3,
                              .max_grad_norm = 0.4,
                              .weight_decay = 0.5,
                              .warmup_steps = 4,
                              .schedule = LearningRateSchedule::kLinear,
                              .total_steps = 12};
  const OptimizerOptions same = Overridden(options, {});
  EXPECT_EQ(LearningRateAt(same, 0), 0.25);
  EXPECT_EQ(same.beta1, 0.1);
  EXPECT_EQ(same.max_grad_norm, 0.4);
  const OptimizerOptions other = Overridden(options, {.learning_rate = 2,
                                                      .beta1 = 0.6,
                                                      .beta2 = 0.7,
                                                      .epsilon = 0.8,
                                                      .weight_decay = 0.9,
                                                      .max_grad_norm = 0});
  for (const int64_t steps : {0, 3, 100}) EXPECT_EQ(LearningRateAt(other, steps), 2);
  EXPECT_EQ(other.beta1, 0.6);
  EXPECT_EQ(other.beta2, 0.7);
  EXPECT_EQ(other.epsilon, 0.8);
  EXPECT_EQ(other.weight_decay, 0.9);
  EXPECT_EQ(other.max_grad_norm, 0);
}

}  // namespace
}  // namespace tandem::training
