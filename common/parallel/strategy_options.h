// Which strategy trains, and how: the section `strategy` of a configuration. No torch.
#ifndef TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_

#include <string>

#include "common/parallel/zero_options.h"

namespace tandem::parallel {

struct StrategyOptions {
  std::string name = "single";  // "single", "zero"
  ZeroOptions zero = {};        // of that name
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_STRATEGY_OPTIONS_H_
