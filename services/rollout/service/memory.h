// The memory that a rollout server's configuration needs on this rank of it.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/model/memory_plan.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rollout {

// `config` must be resolved. A model whose config.json cannot be read is an error that names its
// field, as is a layout that does not fit the ranks or the models.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::RolloutServerConfig& config);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_
