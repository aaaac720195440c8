// Options of AdamW and its schedule, as tandem.config.v1.OptimizerOptions has them; common/config
// has their defaults and checks their ranges.
#ifndef TANDEM_COMMON_OPTIM_OPTIMIZER_OPTIONS_H_
#define TANDEM_COMMON_OPTIM_OPTIMIZER_OPTIONS_H_

#include <cstdint>
#include <optional>

namespace tandem {

enum class LearningRateSchedule {
  kConstant,
  kLinear,  // to min_learning_rate at total_steps
  kCosine,  // half a cosine to min_learning_rate at total_steps
};

struct OptimizerOptions {
  double learning_rate;
  double beta1;
  double beta2;
  double epsilon;
  double max_grad_norm;       // global norm; 0 turns clipping off
  double weight_decay = 0.0;  // decoupled, on matrices only
  int64_t warmup_steps = 0;   // step i of W has learning_rate * i / W
  LearningRateSchedule schedule = LearningRateSchedule::kConstant;
  int64_t total_steps = 0;
  double min_learning_rate = 0.0;
};

// Numbers for one update, in place of the configured ones; what is not set stays as configured.
struct OptimizerOverrides {
  std::optional<double> learning_rate = {};  // in place of the schedule's
  std::optional<double> beta1 = {}, beta2 = {}, epsilon = {}, weight_decay = {}, max_grad_norm = {};

  bool operator==(const OptimizerOverrides&) const = default;
};

// Returns the options of an update. A given learning rate has no schedule.
OptimizerOptions Overridden(const OptimizerOptions& configured,
                            const OptimizerOverrides& overrides);

}  // namespace tandem

#endif  // TANDEM_COMMON_OPTIM_OPTIMIZER_OPTIONS_H_
