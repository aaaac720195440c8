#include "services/critic/service/critic_app.h"

#include <utility>

#include "common/base/status_macros.h"
#include "services/training/service/optimizer_config.h"

namespace tandem::critic {
namespace {

CriticServiceOptions ToServiceOptions(const config::v1::CriticServerConfig& config,
                                      absl::Time start_time) {
  CriticServiceOptions options;
  options.max_samples = config.max_samples();
  options.start_time = start_time;
  return options;
}

}  // namespace

EngineOptions ToEngineOptions(const config::v1::CriticServerConfig& config) {
  EngineOptions options;
  options.model = config.model();
  options.untie_embeddings = config.untie_embeddings();
  options.value_head_seed = config.value_head_seed();
  options.optimizer = training::ToOptimizerOptions(config.optimizer());
  options.micro_batch_tokens = config.batch().micro_batch_tokens();
  options.max_model_len = config.max_model_len();
  options.max_samples = config.max_samples();
  options.num_threads = config.compute().num_threads();
  return options;
}

CriticApp::CriticApp(const config::v1::CriticServerConfig& config, rpc::ServerRuntime& runtime,
                     EngineFactory create_engine)
    : config_(config),
      create_engine_(std::move(create_engine)),
      service_(ToServiceOptions(config, runtime.start_time), runtime.executor, runtime.metrics) {}

std::vector<rpc::NamedService> CriticApp::services() {
  return {{v1::CriticService::service_full_name(), &service_}};
}

absl::Status CriticApp::Load() {
  TANDEM_ASSIGN_OR_RETURN(engine_, create_engine_(ToEngineOptions(config_)));
  service_.SetEngine(engine_.get());
  return absl::OkStatus();
}

}  // namespace tandem::critic
