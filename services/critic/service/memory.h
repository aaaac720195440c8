// The memory that a critic server's configuration needs.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/model/memory_plan.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::critic {

// `config` must be resolved. A model whose config.json cannot be read is an error that names its
// field.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::CriticServerConfig& config);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_
