// The strategy that a configuration names.
#ifndef TANDEM_COMMON_PARALLEL_CREATE_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_CREATE_STRATEGY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/strategy.h"
#include "common/parallel/strategy_options.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

// Returns the strategy `options.name` for the ranks of `world`. Errors name "strategy.<field>":
// those of CheckStrategyName, and INVALID_ARGUMENT for a strategy that does not fit the number of
// ranks.
absl::StatusOr<std::unique_ptr<Strategy>> CreateStrategy(
    const StrategyOptions& options, std::shared_ptr<ranks::Communicator> world);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_CREATE_STRATEGY_H_
