// Options of AdamW and its schedule, as tandem.config.v1.OptimizerOptions has them; common/config
// checks their ranges.
#ifndef TANDEM_COMMON_TRAINING_OPTIMIZER_OPTIONS_H_
#define TANDEM_COMMON_TRAINING_OPTIMIZER_OPTIONS_H_

#include <cstdint>

namespace tandem {

enum class LearningRateSchedule {
  kConstant,
  kLinear,  // to min_learning_rate at total_steps
  kCosine,  // half a cosine to min_learning_rate at total_steps
};

struct OptimizerOptions {
  double learning_rate = 1e-6;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;   // decoupled, on matrices only
  double max_grad_norm = 1.0;  // global norm; 0 turns clipping off
  int64_t warmup_steps = 0;    // step i of W has learning_rate * i / W
  LearningRateSchedule schedule = LearningRateSchedule::kConstant;
  int64_t total_steps = 0;
  double min_learning_rate = 0.0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TRAINING_OPTIMIZER_OPTIONS_H_
