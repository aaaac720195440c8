// For tests: expects that two strategies train alike.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_SAME_TRAINING_H_
#define TANDEM_COMMON_PARALLEL_TESTING_SAME_TRAINING_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "common/parallel/strategy.h"
#include "common/parallel/testing/strategy_runs.h"

namespace tandem::parallel {

inline constexpr double kTolerance = 1e-5;  // relative, in float32

inline void ExpectClose(double a, double b) { EXPECT_NEAR(a, b, kTolerance * std::abs(b)); }

inline void ExpectSameNumbers(const std::vector<StepNumbers>& a,
                              const std::vector<StepNumbers>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    ExpectClose(a[i].loss, b[i].loss);
    ExpectClose(a[i].grad_norm, b[i].grad_norm);
    ExpectClose(a[i].router_loss, b[i].router_loss);
    EXPECT_EQ(a[i].longest, b[i].longest);
  }
}

inline void ExpectSameParameters(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    // Adam divides by the root of small second moments: a step's last bits weigh more than 1e-5.
    EXPECT_TRUE(at::allclose(a[i].second, b[i].second, 1e-3, 2e-4)) << a[i].first;
  }
}

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_SAME_TRAINING_H_
