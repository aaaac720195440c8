#include "common/loss/value_loss.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/not_finite.h"

namespace tandem::loss {
namespace {

double Mean(absl::Span<const double> numbers) {
  double sum = 0;
  for (double x : numbers) sum += x;
  return numbers.empty() ? 0.0 : sum / static_cast<double>(numbers.size());
}

double Variance(absl::Span<const double> numbers) {
  const double mean = Mean(numbers);
  double sum = 0;
  for (double x : numbers) sum += (x - mean) * (x - mean);
  return numbers.empty() ? 0.0 : sum / static_cast<double>(numbers.size());
}

}  // namespace

absl::StatusOr<ValueLossEvaluator> ValueLossEvaluator::Create(const ValueLossOptions& options,
                                                              const ValueTokens& tokens) {
  if (!std::isfinite(options.clip) || options.clip < 0) {
    return InvalidField("value_clip", "must not be negative");
  }
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
      const double cut = std::clamp(value, old - options_.clip, old + options_.clip);
      const double cut_error = cut - tokens_->returns[t];
      if (cut_error * cut_error > squared) {
        squared = cut_error * cut_error;
        gradient = 0;  // the cut value does not move with the value
        ++clipped_;
      }
    }
    loss_ += 0.5 * tokens_->scales[t] * squared;
    gradients[i] = tokens_->scales[t] * gradient;
    seen_values_.push_back(value);
    seen_returns_.push_back(tokens_->returns[t]);
  }
  return absl::OkStatus();
}

ValueMetrics ValueLossEvaluator::Metrics() const {
  ValueMetrics metrics;
  metrics.loss = loss_;
  metrics.tokens = static_cast<int64_t>(seen_values_.size());
  if (metrics.tokens == 0) return metrics;
  metrics.clip_fraction = static_cast<double>(clipped_) / static_cast<double>(metrics.tokens);
  metrics.value_mean = Mean(seen_values_);
  metrics.return_mean = Mean(seen_returns_);
  std::vector<double> errors(seen_values_.size());
  for (size_t i = 0; i < errors.size(); ++i) errors[i] = seen_returns_[i] - seen_values_[i];
  const double variance = Variance(seen_returns_);
  if (variance > 0) metrics.explained_variance = 1.0 - Variance(errors) / variance;
  return metrics;
}

}  // namespace tandem::loss
