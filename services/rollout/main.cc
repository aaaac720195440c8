// tandem-rollout-server
#include <cstdint>
#include <memory>
#include <optional>

#include "common/base/machine/memory_plan.h"
#include "common/model/device_check.h"
#include "common/rpc/server/server_main.h"
#include "common/speculator/speculator_memory.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/service/memory.h"
#include "services/rollout/service/rollout_app.h"
#include "tandem/config/v1/server_config.pb.h"

int main(int argc, char** argv) {
  return tandem::rpc::ServerMain<tandem::config::v1::RolloutServerConfig>(
      argc, argv, "rollout",
      [](const auto& config, tandem::rpc::ServerRuntime& runtime) {
        return std::make_unique<tandem::rollout::RolloutApp>(config, runtime,
                                                             tandem::rollout::CreateEngine);
      },
      {.measure_devices =
           [](const auto& config, const std::optional<int64_t>& assumed, tandem::FreeMemory& free) {
             return tandem::MeasureDevices(
                 config.compute().device(), config.compute().ranks_per_gpu(),
                 {config.junior().gpu_devices().begin(), config.junior().gpu_devices().end()},
                 assumed, free);
           },
       .plan =
           [](const auto& config, const tandem::FreeMemory& free) {
             return tandem::rollout::PlanMemory(config, free,
                                                tandem::speculator::MeasureSpeculator);
           }});
}
