#include "common/parallel/create_strategy.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strategy_name.h"
#include "common/parallel/single_strategy.h"
#include "common/parallel/zero_strategy.h"

namespace tandem::parallel {

absl::StatusOr<std::unique_ptr<Strategy>> CreateStrategy(const StrategyOptions& options,
                                                         std::shared_ptr<Communicator> world) {
  TANDEM_RETURN_IF_ERROR(CheckStrategyName(options.name));
  if (options.name == "zero") return std::make_unique<ZeroStrategy>(options.zero, std::move(world));
  if (world->size() > 1) {
    return InvalidField("strategy.name", absl::StrCat("single is for one rank, and the server has ",
                                                      world->size(), ": zero is for several"));
  }
  return std::make_unique<SingleStrategy>();
}

}  // namespace tandem::parallel
