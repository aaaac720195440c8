// The section `strategy` of a configuration: the strategy that trains, and its options. No torch.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_

#include <string>

#include "common/parallel/megatron/megatron_options.h"
#include "common/parallel/memory/recompute.h"
#include "common/parallel/zero/zero_options.h"

namespace tandem::parallel {

struct StrategyOptions {
  std::string name;  // "single", "zero" or "megatron"
  Recompute recompute_granularity = Recompute::kNone;
  // Whether functions of hidden states, which a pipeline calls on its last stage, read the images
  // of a batch: other models do.
  bool outputs_read_images = false;
  // Read by the strategy of that name alone.
  ZeroOptions zero = {};
  MegatronOptions megatron = {};
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
