// The learning rate of every optimizer step.
#ifndef TANDEM_COMMON_TRAINING_LEARNING_RATE_H_
#define TANDEM_COMMON_TRAINING_LEARNING_RATE_H_

#include <cstdint>

#include "common/training/optimizer_options.h"

namespace tandem::training {

// Learning rate of the step that follows `steps_done` completed ones. Step i (from 1) of W warm-up
// steps has learning_rate * i / W. Afterwards the schedule falls from learning_rate, first to
// min_learning_rate once total_steps are done, and stays there.
double LearningRateAt(const OptimizerOptions& options, int64_t steps_done);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_LEARNING_RATE_H_
