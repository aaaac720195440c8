// Functions for tests of the reports of several evaluators.
#ifndef TANDEM_COMMON_LOSS_TESTING_REDUCE_BY_HAND_H_
#define TANDEM_COMMON_LOSS_TESTING_REDUCE_BY_HAND_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/base/struct_bytes.h"

namespace tandem::loss {

// Calls Reduce of each evaluator with the sums and maxima over all of them.
template <typename Evaluator>
void ReduceByHand(std::vector<Evaluator>& evaluators) {
  std::vector<double> all_sums, all_maxima;
  for (Evaluator seen : evaluators) {  // a copy, to read its numbers
    const auto add = [&](absl::Span<double> sums, absl::Span<double> maxima) {
      all_sums.resize(sums.size(), 0.0);
      all_maxima.resize(maxima.size(), -INFINITY);
      for (size_t i = 0; i < sums.size(); ++i) all_sums[i] += sums[i];
      for (size_t i = 0; i < maxima.size(); ++i) {
        all_maxima[i] = std::max(all_maxima[i], maxima[i]);
      }
      return absl::OkStatus();
    };
    ASSERT_TRUE(seen.Reduce(add).ok());
  }
  for (Evaluator& evaluator : evaluators) {
    const auto replace = [&](absl::Span<double> sums, absl::Span<double> maxima) {
      std::copy(all_sums.begin(), all_sums.end(), sums.begin());
      std::copy(all_maxima.begin(), all_maxima.end(), maxima.begin());
      return absl::OkStatus();
    };
    ASSERT_TRUE(evaluator.Reduce(replace).ok());
  }
}

// Returns all numbers of a struct and of the structs in it, in their order.
template <typename T>
std::vector<double> NumbersOf(const T& value) {
  if constexpr (!struct_bytes::Struct<T>) {
    return {static_cast<double>(value)};
  } else {
    std::vector<double> numbers;
    struct_bytes::ForEachField(value, [&](const auto& field) {
      const std::vector<double> own = NumbersOf(field);
      numbers.insert(numbers.end(), own.begin(), own.end());
    });
    return numbers;
  }
}

// Expects equal metrics, up to the order of sums. All fields are compared, future ones too.
template <typename Metrics>
void ExpectSameMetrics(const Metrics& actual, const Metrics& expected) {
  const std::vector<double> numbers = NumbersOf(actual), wanted = NumbersOf(expected);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(numbers[i], wanted[i], 1e-12 * std::abs(wanted[i])) << "number " << i;
  }
}

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_TESTING_REDUCE_BY_HAND_H_
