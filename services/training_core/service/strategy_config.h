// Turns the strategy of a resolved configuration into the plain structs of engines, and checks that
// it fits the ranks and the model.
#ifndef TANDEM_SERVICES_TRAINING_CORE_SERVICE_STRATEGY_CONFIG_H_
#define TANDEM_SERVICES_TRAINING_CORE_SERVICE_STRATEGY_CONFIG_H_

#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/parallel/memory/training_memory.h"
#include "common/parallel/strategy_options.h"
#include "common/ranks/monitor/rank_timeouts.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::training {

// `config` must be resolved (common/config/server_config.h).
parallel::StrategyOptions ToStrategyOptions(const config::v1::StrategyOptions& config);
ranks::RankTimeouts ToRankTimeouts(const config::v1::StrategyOptions& config);

// Returns the memory that this rank needs to train `model`, in micro-batches of
// `micro_batch_tokens` tokens; a sequence of `max_model_len` tokens that is longer has a
// micro-batch of its own. `checkpoint_snapshot` is the server's setting. Errors name a field of
// "strategy" where the ranks or the model do not fit the layout, or "freeze".
absl::StatusOr<MemoryPlan> PlanTraining(const config::v1::StrategyOptions& config,
                                        const parallel::TrainedModel& model,
                                        int64_t micro_batch_tokens, int64_t max_model_len,
                                        bool checkpoint_snapshot);

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_SERVICE_STRATEGY_CONFIG_H_
