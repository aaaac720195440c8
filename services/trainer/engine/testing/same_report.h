// For tests: expects that two steps report the same.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SAME_REPORT_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SAME_REPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

inline constexpr double kTolerance = 1e-5;  // relative, in float32

inline void ExpectSameReport(const StepResult& a, const StepResult& b) {
  EXPECT_EQ(a.report.weights.version, b.report.weights.version);
  EXPECT_EQ(a.report.skipped, b.report.skipped);
  EXPECT_EQ(a.report.skip_reason, b.report.skip_reason);
  ASSERT_EQ(a.report.metrics.size(), b.report.metrics.size());
  for (const auto& [name, value] : b.report.metrics) {
    const auto found = a.report.metrics.find(name);
    ASSERT_NE(found, a.report.metrics.end()) << name;
    // The number of micro-batches depends on the ranks.
    if (name == "policy/micro_batches") continue;
    // Differences of log-probabilities are as exact as the log-probabilities, of size 1 to 10; the
    // terms of the losses, of size 1, nearly cancel.
    const bool difference = absl::StartsWith(name, "mismatch/") || absl::StrContains(name, "kl");
    const double least = difference ? 1 : absl::StartsWith(name, "loss/") ? 0.1 : 1e-2;
    const double size = std::max(std::abs(value), least);
    EXPECT_NEAR(found->second, value, kTolerance * size) << name;
  }
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TESTING_SAME_REPORT_H_
