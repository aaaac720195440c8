// tandem-trainer-server
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/base/machine/memory_plan.h"
#include "common/model/device_check.h"
#include "common/rpc/server/server_main.h"
#include "common/speculator/speculator_settings.h"
#include "services/trainer/engine/engine.h"
#include "services/trainer/service/memory.h"
#include "services/trainer/service/objective_convert.h"
#include "services/trainer/service/trainer_app.h"
#include "tandem/config/v1/server_config.pb.h"

int main(int argc, char** argv) {
  return tandem::rpc::ServerMain<tandem::config::v1::TrainerServerConfig>(
      argc, argv, "trainer",
      [](const auto& config, tandem::rpc::ServerRuntime& runtime) {
        return std::make_unique<tandem::trainer::TrainerApp>(config, runtime,
                                                             tandem::trainer::CreateEngine);
      },
      {.measure_devices =
           [](const auto& config, const std::optional<int64_t>& assumed, tandem::FreeMemory& free) {
             return tandem::MeasureDevices(config.compute().device(),
                                           config.compute().ranks_per_gpu(), {}, assumed, free);
           },
       .plan =
           [](const auto& config, const tandem::FreeMemory& free) {
             return tandem::trainer::PlanMemory(config, free,
                                                tandem::speculator::CountSpeculatorValues);
           }},
      {.flag = "--check-objective",
       .help = "With --check-config: also check this objective, JSON or YAML as in a run file, and "
               "print the one in force as the last line",
       .check = [](const auto& config, const std::string& text) {
         return tandem::trainer::ResolveObjectiveText(text, tandem::trainer::SupportOf(config));
       }});
}
