#include "common/optim/optimizer_options.h"

namespace tandem {

OptimizerOptions Overridden(const OptimizerOptions& configured,
                            const OptimizerOverrides& overrides) {
  OptimizerOptions options = configured;
  if (overrides.learning_rate.has_value()) {
    options.learning_rate = *overrides.learning_rate;
    options.schedule = LearningRateSchedule::kConstant;
    options.warmup_steps = 0;
  }
  options.beta1 = overrides.beta1.value_or(configured.beta1);
  options.beta2 = overrides.beta2.value_or(configured.beta2);
  options.epsilon = overrides.epsilon.value_or(configured.epsilon);
  options.weight_decay = overrides.weight_decay.value_or(configured.weight_decay);
  options.max_grad_norm = overrides.max_grad_norm.value_or(configured.max_grad_norm);
  return options;
}

}  // namespace tandem
