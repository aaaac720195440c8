// The memory that a trainer server's configuration needs.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/model/memory_plan.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::trainer {

// `config` must be resolved. A model whose config.json cannot be read is an error that names its
// field.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
