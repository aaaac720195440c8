// The memory requirement of this rank of a rollout server.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/speculator/speculator_memory.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rollout {

// Returns the size of a speculator for a model of that hidden size, with or without packed heads.
// The caller passes
// speculator::MeasureSpeculator, because this library does not link torch.
using SpeculatorSizer = std::function<absl::StatusOr<speculator::SpeculatorSize>(
    const std::string& directory, int64_t hidden_size, bool packs_heads)>;

// Returns the memory plan of a resolved configuration on a machine with this free memory. Errors
// are those of CheckOptions, or name the field of a model or speculator whose config.json cannot be
// read or does not fit, or of a layout that does not fit the ranks or the models.
absl::StatusOr<MemoryPlan> PlanMemory(const config::v1::RolloutServerConfig& config,
                                      const FreeMemory& free,
                                      const SpeculatorSizer& measure_speculator);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_MEMORY_H_
