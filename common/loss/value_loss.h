// The critic's losses: the clipped squared error of PPO, per token, and one of given derivatives.
#ifndef TANDEM_COMMON_LOSS_VALUE_LOSS_H_
#define TANDEM_COMMON_LOSS_VALUE_LOSS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/metric_reduction.h"

namespace tandem::loss {

// The default of `value_clip` in requests.
inline constexpr double kDefaultValueClip = 0.2;

struct ValueLossOptions {
  double clip;  // largest distance from the old value; 0 is off
};

struct ValueTokens {
  std::vector<double> returns;     // [N]
  std::vector<double> old_values;  // [N]; may be empty if the clip is off
  std::vector<double> scales;      // [N], loss_scale.h
};

struct ValueMetrics {
  double loss = 0;
  int64_t tokens = 0;
  double clip_fraction = 0;       // tokens whose clipped error is the larger one
  double explained_variance = 0;  // 1 - var(R - v) / var(R); 0 when var(R) is 0
  double value_mean = 0;
  double return_mean = 0;
};

// Evaluates rows, and sums over them: loss = sum_t scale_t * max((v - R)^2, (clip(v) - R)^2) / 2.
class ValueLossEvaluator {
 public:
  // `tokens` must outlive the evaluator. INVALID_ARGUMENT for lengths that differ, or a negative
  // clip ("value_clip").
  static absl::StatusOr<ValueLossEvaluator> Create(const ValueLossOptions& options,
                                                   const ValueTokens& tokens);

  // Fills d loss / d value of the rows [first_row, first_row + n). NotFiniteError for a value.
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> values,
                        absl::Span<double> gradients);

  ValueMetrics Metrics() const;

  // Like PolicyLossEvaluator::Reduce.
  absl::Status Reduce(MetricReduction reduce);

 private:
  // The two sums of a variance, of distances from a number near the mean. Every evaluator of the
  // tokens uses the same number, so sums can be added; and a small variance of large numbers keeps
  // its digits.
  struct Spread {
    double around = 0;
    double sum = 0, squares = 0;
    void Add(double x);
    double Variance(double count) const;
  };

  ValueLossEvaluator(const ValueLossOptions& options, const ValueTokens& tokens);

  ValueLossOptions options_;
  const ValueTokens* tokens_;
  double loss_ = 0, values_ = 0, returns_ = 0;
  int64_t count_ = 0, clipped_ = 0;
  Spread return_spread_, error_spread_;
};

// A loss of the values that is given by its derivatives. Evaluates rows, and sums over them:
// loss = sum_t weight_t * value_t.
class WeightedValueLoss {
 public:
  // `weights` has one number for each row, and must outlive the loss.
  explicit WeightedValueLoss(absl::Span<const double> weights) : weights_(weights) {}

  // Fills d loss / d value of the rows [first_row, first_row + n). NotFiniteError for a value.
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> values,
                        absl::Span<double> gradients);

  double loss() const { return loss_; }
  // Mean over the evaluated rows; 0 without any.
  double mean_value() const { return count_ == 0 ? 0 : values_ / static_cast<double>(count_); }

  // Like PolicyLossEvaluator::Reduce.
  absl::Status Reduce(MetricReduction reduce);

 private:
  absl::Span<const double> weights_;
  double loss_ = 0, values_ = 0;
  int64_t count_ = 0;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_VALUE_LOSS_H_
