// tandem-critic-server
#include <cstdint>
#include <memory>
#include <optional>

#include "common/base/machine/memory_plan.h"
#include "common/model/device_check.h"
#include "common/rpc/server/server_main.h"
#include "services/critic/engine/engine.h"
#include "services/critic/service/critic_app.h"
#include "services/critic/service/memory.h"
#include "tandem/config/v1/server_config.pb.h"

int main(int argc, char** argv) {
  return tandem::rpc::ServerMain<tandem::config::v1::CriticServerConfig>(
      argc, argv, "critic",
      [](const auto& config, tandem::rpc::ServerRuntime& runtime) {
        return std::make_unique<tandem::critic::CriticApp>(config, runtime,
                                                           tandem::critic::CreateEngine);
      },
      {.measure_devices =
           [](const auto& config, const std::optional<int64_t>& assumed, tandem::FreeMemory& free) {
             return tandem::MeasureDevices(config.compute().device(),
                                           config.compute().ranks_per_gpu(), {}, assumed, free);
           },
       .plan = [](const auto& config,
                  const tandem::FreeMemory&) { return tandem::critic::PlanMemory(config); }});
}
