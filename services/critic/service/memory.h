// The memory requirement of a critic server.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::critic {

// Returns the memory plan of a resolved configuration. An error names the field of a model whose
// config.json cannot be read.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::CriticServerConfig& config);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_MEMORY_H_
