#include "services/training_core/service/testing/resolved_options.h"

#include <cstdlib>
#include <iostream>

#include "absl/status/status.h"
#include "common/config/config.h"
#include "common/config/server_config.h"
#include "services/training_core/service/training_config.h"

namespace tandem::training {

void SetResolvedOptions(const std::string& model, const std::vector<std::string>& settings,
                        TrainingOptions* options) {
  config::TrainerServerConfig config;
  config.set_model(model);
  absl::Status status = config::Load({.overrides = settings}, &config);
  if (status.ok()) status = config::Resolve(&config);
  if (!status.ok()) {
    std::cerr << status << std::endl;
    std::exit(1);
  }
  SetTrainingOptions(config, /*environment=*/{}, options);
}

}  // namespace tandem::training
