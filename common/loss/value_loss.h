// The critic's loss: clipped squared error (PPO), per token like policy_loss.h.
#ifndef TANDEM_COMMON_LOSS_VALUE_LOSS_H_
#define TANDEM_COMMON_LOSS_VALUE_LOSS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/metric_reduction.h"

namespace tandem::loss {

struct ValueLossOptions {
  double clip = 0.2;  // the half-width around the old value; 0 is off
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

// Adds up over the rows of a batch: loss = sum_t scale_t * max((v - R)^2, (clip(v) - R)^2) / 2.
class ValueLossEvaluator {
 public:
  // `tokens` must outlive the evaluator. INVALID_ARGUMENT on lengths that differ or a bad clip.
  static absl::StatusOr<ValueLossEvaluator> Create(const ValueLossOptions& options,
                                                   const ValueTokens& tokens);

  // d loss / d value of the rows [first_row, first_row + n). NotFiniteError for a value.
  absl::Status Evaluate(int64_t first_row, absl::Span<const double> values,
                        absl::Span<double> gradients);

  ValueMetrics Metrics() const;

  // As PolicyLossEvaluator::Reduce.
  absl::Status Reduce(MetricReduction reduce);

 private:
  // Sums of what a variance is made of. Taken around a number near the mean, which every evaluator
  // of the tokens knows beforehand, they add up and yet keep the digits of a small variance far
  // from 0.
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

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_VALUE_LOSS_H_
