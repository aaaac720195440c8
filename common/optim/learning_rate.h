// The learning rate of every optimizer step.
#ifndef TANDEM_COMMON_OPTIM_LEARNING_RATE_H_
#define TANDEM_COMMON_OPTIM_LEARNING_RATE_H_

#include <cstdint>

#include "common/optim/optimizer_options.h"

namespace tandem::training {

// Returns the learning rate of the step that follows `steps_done` completed ones. Step i (from 1)
// of W warm-up steps has learning_rate * i / W. After the warm-up the schedule falls from
// learning_rate to min_learning_rate, reaches it once total_steps are done, and stays there.
double LearningRateAt(const OptimizerOptions& options, int64_t steps_done);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_OPTIM_LEARNING_RATE_H_
