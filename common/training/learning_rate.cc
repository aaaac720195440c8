#include "common/training/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/base/error.h"

namespace tandem::training {

absl::Status CheckOptimizerOptions(const OptimizerOptions& options) {
  const auto not_negative = [](double x) { return std::isfinite(x) && x >= 0; };
  const auto is_decay = [](double x) { return x >= 0 && x < 1; };
  if (!not_negative(options.learning_rate)) {
    return InvalidField("learning_rate", "must not be negative");
  }
  if (!is_decay(options.beta1)) return InvalidField("beta1", "must be in [0, 1)");
  if (!is_decay(options.beta2)) return InvalidField("beta2", "must be in [0, 1)");
  if (!(options.epsilon > 0 && std::isfinite(options.epsilon))) {
    return InvalidField("epsilon", "must be positive");
  }
  if (!not_negative(options.weight_decay)) {
    return InvalidField("weight_decay", "must not be negative");
  }
  if (!not_negative(options.max_grad_norm)) {
    return InvalidField("max_grad_norm", "must not be negative");
  }
  if (options.warmup_steps < 0) return InvalidField("warmup_steps", "must not be negative");
  if (!not_negative(options.min_learning_rate) ||
      options.min_learning_rate > options.learning_rate) {
    return InvalidField("min_learning_rate", "must be between 0 and learning_rate");
  }
  if (options.schedule != LearningRateSchedule::kConstant &&
      options.total_steps <= options.warmup_steps) {
    return InvalidField("total_steps", "must be greater than warmup_steps for this schedule");
  }
  return absl::OkStatus();
}

double LearningRateAt(const OptimizerOptions& options, int64_t steps_done) {
  if (steps_done < options.warmup_steps) {
    return options.learning_rate * static_cast<double>(steps_done + 1) /
           static_cast<double>(options.warmup_steps);
  }
  if (options.schedule == LearningRateSchedule::kConstant) return options.learning_rate;
  const double progress =
      std::min(1.0, static_cast<double>(steps_done - options.warmup_steps) /
                        static_cast<double>(options.total_steps - options.warmup_steps));
  const double share = options.schedule == LearningRateSchedule::kLinear
                           ? 1.0 - progress
                           : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.min_learning_rate + share * (options.learning_rate - options.min_learning_rate);
}

}  // namespace tandem::training
