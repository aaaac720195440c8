// Which strategy trains, and how: the section `strategy` of a configuration. No torch.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_

#include <string>

#include "common/parallel/megatron_options.h"
#include "common/parallel/recompute.h"
#include "common/parallel/zero_options.h"

namespace tandem::parallel {

// Of the name, `single`, `zero` or `megatron`, the member of that name counts.
struct StrategyOptions {
  struct Single {
    Recompute recompute_granularity = Recompute::kNone;
  };

  std::string name = "single";
  Single single = {};
  ZeroOptions zero = {};
  MegatronOptions megatron = {};
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
