#include "common/loss/value_loss.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"

namespace tandem::loss {

void ValueLossEvaluator::Spread::Add(double x) {
  const double d = x - around;
  sum += d;
  squares += d * d;
}

double ValueLossEvaluator::Spread::Variance(double count) const {
  return std::max(0.0, (squares - sum * sum / count) / count);
}

ValueLossEvaluator::ValueLossEvaluator(const ValueLossOptions& options, const ValueTokens& tokens)
    : options_(options), tokens_(&tokens) {
  if (tokens.returns.empty()) return;
  return_spread_.around = tokens.returns.front();
  if (tokens.old_values.empty()) return;
  error_spread_.around = tokens.returns.front() - tokens.old_values.front();
}

absl::StatusOr<ValueLossEvaluator> ValueLossEvaluator::Create(const ValueLossOptions& options,
                                                              const ValueTokens& tokens) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("value_clip", options.clip, 0));
  const size_t rows = tokens.returns.size();
  if (tokens.scales.size() != rows) return InvalidField("scales", "must have one entry per return");
  if (options.clip > 0 && tokens.old_values.size() != rows) {
    return InvalidField("old_values", "must have one entry per return when values are clipped");
  }
  return ValueLossEvaluator(options, tokens);
}

absl::Status ValueLossEvaluator::Evaluate(int64_t first_row, absl::Span<const double> values,
                                          absl::Span<double> gradients) {
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t t = static_cast<size_t>(first_row) + i;
    const double value = values[i];
    if (!std::isfinite(value)) {
      return NotFiniteError(absl::StrCat("the value of row ", t, " is not finite"));
    }
    const double error = value - tokens_->returns[t];
    double squared = error * error;
    double gradient = error;
    if (options_.clip > 0) {
      const double old = tokens_->old_values[t];
      const double clipped = std::clamp(value, old - options_.clip, old + options_.clip);
      const double clipped_error = clipped - tokens_->returns[t];
      if (clipped_error * clipped_error > squared) {
        squared = clipped_error * clipped_error;
        gradient = 0;  // the clipped value is constant
        ++clipped_;
      }
    }
    loss_ += 0.5 * tokens_->scales[t] * squared;
    gradients[i] = tokens_->scales[t] * gradient;
    values_ += value;
    returns_ += tokens_->returns[t];
    return_spread_.Add(tokens_->returns[t]);
    error_spread_.Add(-error);
    ++count_;
  }
  return absl::OkStatus();
}

ValueMetrics ValueLossEvaluator::Metrics() const {
  ValueMetrics metrics;
  metrics.loss = loss_;
  metrics.tokens = count_;
  if (count_ == 0) return metrics;
  const auto count = static_cast<double>(count_);
  metrics.clip_fraction = static_cast<double>(clipped_) / count;
  metrics.value_mean = values_ / count;
  metrics.return_mean = returns_ / count;
  const double variance = return_spread_.Variance(count);
  if (variance > 0) metrics.explained_variance = 1.0 - error_spread_.Variance(count) / variance;
  return metrics;
}

absl::Status ValueLossEvaluator::Reduce(MetricReduction reduce) {
  return ReduceMetrics(reduce,
                       {&loss_, &values_, &returns_, &count_, &clipped_, &return_spread_.sum,
                        &return_spread_.squares, &error_spread_.sum, &error_spread_.squares},
                       {});
}

absl::Status WeightedValueLoss::Evaluate(int64_t first_row, absl::Span<const double> values,
                                         absl::Span<double> gradients) {
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t t = static_cast<size_t>(first_row) + i;
    if (!std::isfinite(values[i])) {
      return NotFiniteError(absl::StrCat("the value of row ", t, " is not finite"));
    }
    gradients[i] = weights_[t];
    loss_ += weights_[t] * values[i];
    values_ += values[i];
    ++count_;
  }
  return absl::OkStatus();
}

absl::Status WeightedValueLoss::Reduce(MetricReduction reduce) {
  return ReduceMetrics(reduce, {&loss_, &values_, &count_}, {});
}

}  // namespace tandem::loss
