// tandem-rollout-server
#include <memory>

#include "common/base/status_macros.h"
#include "common/model/device_check.h"
#include "common/rpc/server_main.h"
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
      [](const auto& config) -> absl::StatusOr<tandem::MemoryPlan> {
        TANDEM_RETURN_IF_ERROR(tandem::CheckDevice(config.compute().device()));
        return tandem::rollout::PlanMemory(config, tandem::speculator::MeasureSpeculator);
      });
}
