// The strategy of a resolved configuration: as the plain structs that engines take, and whether it
// fits the ranks and the model.
#ifndef TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_
#define TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_

#include "absl/status/statusor.h"
#include "common/model/memory_plan.h"
#include "common/model/model_config.h"
#include "common/model/parameter_spec.h"
#include "common/parallel/rank_timeouts.h"
#include "common/parallel/strategy_options.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::training {

// `config` must be resolved (common/config/server_config.h).
parallel::StrategyOptions ToStrategyOptions(const config::v1::StrategyOptions& config);
parallel::RankTimeouts ToRankTimeouts(const config::v1::StrategyOptions& config);

// What a rank of this process's server holds of the model. Errors of "strategy" where the ranks, or
// the model, do not fit the layout.
absl::StatusOr<MemoryShares> CheckLayout(const config::v1::StrategyOptions& config,
                                         const ModelConfig& model, HeadKind head);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_SERVICE_STRATEGY_CONFIG_H_
