// The memory requirement of a trainer server.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/base/memory_plan.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::trainer {

// Returns the memory plan of a resolved configuration. An error names the field of a model whose
// config.json cannot be read.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
