// For tests: whether counts follow a distribution.
#ifndef TANDEM_COMMON_BASE_TESTING_CHI_SQUARE_H_
#define TANDEM_COMMON_BASE_TESTING_CHI_SQUARE_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

namespace tandem {

// Tests accept counts that are below this number of standard deviations.
inline constexpr double kSigmas = 4.0;

// Returns Pearson's chi-square statistic of `counts` in standard deviations above its mean, for
// draws from `probabilities`, by the approximation of Wilson and Hilferty (1931), whose tail is the
// normal one. Outcomes that are expected less than five times count as one. Infinity if an outcome
// of probability 0 occurred.
inline double ChiSquareSigmas(std::span<const int64_t> counts,
                              std::span<const double> probabilities) {
  const auto draws = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double statistic = 0, rare = 0, expected_rare = 0;
  int cells = 0;
  const auto add = [&](double count, double expected) {
    statistic += (count - expected) * (count - expected) / expected;
    ++cells;
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto count = static_cast<double>(counts[i]);
    const double expected = draws * probabilities[i];
    if (expected == 0 && count > 0) return std::numeric_limits<double>::infinity();
    if (expected >= 5) {
      add(count, expected);
    } else {
      rare += count;
      expected_rare += expected;
    }
  }
  if (expected_rare > 0) add(rare, expected_rare);
  const double spread = 2.0 / (9.0 * (cells - 1));
  return (std::cbrt(statistic / (cells - 1)) - (1 - spread)) / std::sqrt(spread);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_TESTING_CHI_SQUARE_H_
