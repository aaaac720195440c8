// Converts the optimizer of a resolved configuration into the plain struct of the engines.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_OPTIMIZER_CONFIG_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_OPTIMIZER_CONFIG_H_

#include "common/optim/optimizer_options.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::training {

// `config` must be resolved (common/config/server_config.h).
inline OptimizerOptions ToOptimizerOptions(const config::v1::OptimizerOptions& config) {
  OptimizerOptions out = {.learning_rate = config.learning_rate(),
                          .beta1 = config.beta1(),
                          .beta2 = config.beta2(),
                          .epsilon = config.epsilon(),
                          .max_grad_norm = config.max_grad_norm(),
                          .weight_decay = config.weight_decay(),
                          .warmup_steps = config.warmup_steps(),
                          .total_steps = config.total_steps(),
                          .min_learning_rate = config.min_learning_rate()};
  switch (config.schedule()) {
    case config::v1::LEARNING_RATE_SCHEDULE_LINEAR:
      out.schedule = LearningRateSchedule::kLinear;
      break;
    case config::v1::LEARNING_RATE_SCHEDULE_COSINE:
      out.schedule = LearningRateSchedule::kCosine;
      break;
    default:
      out.schedule = LearningRateSchedule::kConstant;
  }
  return out;
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_OPTIMIZER_CONFIG_H_
