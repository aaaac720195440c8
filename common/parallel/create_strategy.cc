#include "common/parallel/create_strategy.h"

#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/parallel/megatron/megatron_strategy.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/strategy_name.h"
#include "common/parallel/zero/zero_strategy.h"

namespace tandem::parallel {

absl::StatusOr<std::unique_ptr<Strategy>> CreateStrategy(
    const StrategyOptions& options, std::shared_ptr<ranks::Communicator> world) {
  TANDEM_RETURN_IF_ERROR(CheckStrategyName(options.name));
  const Recompute recompute = options.recompute_granularity;
  if (options.name == "zero") {
    return std::make_unique<ZeroStrategy>(options.zero, std::move(world), recompute);
  }
  if (options.name == "megatron") {
    return std::make_unique<MegatronStrategy>(options.megatron, std::move(world), recompute,
                                              options.outputs_read_images);
  }
  TANDEM_RETURN_IF_ERROR(CheckSingleRank(world->size()));
  return std::make_unique<SingleStrategy>(recompute);
}

}  // namespace tandem::parallel
