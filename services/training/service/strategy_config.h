// The strategy of a resolved configuration as the plain structs that engines take.
#ifndef TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_
#define TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_

#include "absl/time/time.h"
#include "common/parallel/rank_timeouts.h"
#include "common/parallel/strategy_options.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::training {

// `config` must be resolved (common/config/server_config.h).
inline parallel::StrategyOptions ToStrategyOptions(const config::v1::StrategyOptions& config) {
  return {.name = config.name(),
          .zero = {.stage = config.stage(),
                   .overlap_comm = config.overlap_comm(),
                   .offload_optimizer = config.offload_optimizer()}};
}

inline parallel::RankTimeouts ToRankTimeouts(const config::v1::StrategyOptions& config) {
  return {.collective = absl::Seconds(config.collective_timeout_seconds()),
          .silence = absl::Seconds(config.heartbeat_timeout_seconds())};
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_
