// The memory requirement of a trainer server.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/speculator/speculator_settings.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::trainer {

// speculator::CountSpeculatorValues, which needs a library that the service does without.
using CountSpeculator = absl::FunctionRef<absl::StatusOr<int64_t>(
    const speculator::SpeculatorSettings& settings, const speculator::BaseModelSizes& base)>;

// The item of a rank's part of a copy of the weights in the GPUs' memory, for rollout servers with
// GPUs of the machine.
inline constexpr char kWeightsCopy[] = "weights_copy";

// Returns the memory plan of a resolved configuration. It has a copy of the weights on the GPU
// where `free` has room for that, too. An error names the field of a model whose config.json cannot
// be read, or of the speculator's settings.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::TrainerServerConfig& config,
                                      const FreeMemory& free, CountSpeculator count_speculator);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_MEMORY_H_
