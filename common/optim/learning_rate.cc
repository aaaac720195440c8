#include "common/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem::training {

double LearningRateAt(const OptimizerOptions& options, int64_t steps_done) {
  if (steps_done < options.warmup_steps) {
    return options.learning_rate * static_cast<double>(steps_done + 1) /
           static_cast<double>(options.warmup_steps);
  }
  if (options.schedule == LearningRateSchedule::kConstant) return options.learning_rate;
  const double progress =
      std::min(1.0, static_cast<double>(steps_done - options.warmup_steps) /
                        static_cast<double>(options.total_steps - options.warmup_steps));
  const double fraction = options.schedule == LearningRateSchedule::kLinear
                              ? 1.0 - progress
                              : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.min_learning_rate + fraction * (options.learning_rate - options.min_learning_rate);
}

}  // namespace tandem::training
