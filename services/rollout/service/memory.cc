#include "services/rollout/service/memory.h"

#include <cstdint>
#include <optional>
#include <string>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/machine_resources.h"
#include "common/base/machine/rank_environment.h"
#include "common/model/config/model_config.h"
#include "common/rpc/convert/compute_config.h"
#include "services/rollout/engine/options_check.h"
#include "services/rollout/engine/ranks/rank_layout.h"
#include "services/rollout/engine/rollout_memory.h"
#include "services/rollout/service/convert.h"

namespace tandem::rollout {

absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::RolloutServerConfig& config,
                                      const FreeMemory& free,
                                      const SpeculatorSizer& measure_speculator) {
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  EngineOptions options = ToEngineOptions(config, environment);
  options.free_memory = free;
  TANDEM_RETURN_IF_ERROR(CheckOptions(options));
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig senior,
                          rpc::ConfiguredModel("senior.model", config.senior().model()));
  std::optional<ModelConfig> junior;
  if (!config.junior().model().empty()) {
    TANDEM_ASSIGN_OR_RETURN(junior, rpc::ConfiguredModel("junior.model", config.junior().model()));
  }
  TANDEM_RETURN_IF_ERROR(CheckRankLayout(
      options.layout, senior, junior.has_value() ? &*junior : nullptr, environment.world_size));
  speculator::SpeculatorSize speculator;
  if (const std::string& directory = config.senior().speculator(); !directory.empty()) {
    const auto measured =
        measure_speculator(directory, senior.hidden_size, HasPackedLanes(options.compute));
    if (!measured.ok()) return PrependFieldPath("senior.speculator", measured.status());
    speculator = *measured;
  }
  return RolloutMemory(senior, junior.has_value() ? &*junior : nullptr,
                       ToMemoryOptions(options, environment.rank, speculator));
}

}  // namespace tandem::rollout
