#include "services/rollout/service/memory.h"

#include <optional>

#include "common/base/rank_environment.h"
#include "common/base/status_macros.h"
#include "common/model/model_config.h"
#include "common/rpc/compute_config.h"
#include "services/rollout/engine/rank_layout.h"
#include "services/rollout/engine/rollout_memory.h"
#include "services/rollout/service/convert.h"

namespace tandem::rollout {

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::RolloutServerConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig senior,
                          rpc::ConfiguredModel("senior_model", config.senior_model()));
  std::optional<ModelConfig> junior;
  if (!config.junior_model().empty()) {
    TANDEM_ASSIGN_OR_RETURN(junior, rpc::ConfiguredModel("junior_model", config.junior_model()));
  }
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  const RankLayout layout = ToRankLayout(config);
  TANDEM_RETURN_IF_ERROR(CheckRankLayout(layout, senior, junior.has_value() ? &*junior : nullptr,
                                         environment.world_size));
  return RolloutMemory(senior, junior.has_value() ? &*junior : nullptr,
                       {.max_num_seqs = config.max_num_seqs(),
                        .max_model_len = config.max_model_len(),
                        .max_batched_tokens = config.max_batched_tokens(),
                        .dtype = rpc::ComputeType(config.compute()),
                        .on_host = config.compute().device() == "cpu",
                        .layout = layout,
                        .rank = environment.rank});
}

}  // namespace tandem::rollout
