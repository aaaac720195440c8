#include "services/critic/service/critic_app.h"

#include <utility>

#include "common/base/errors/status_macros.h"
#include "services/training_core/service/training_config.h"

namespace tandem::critic {
namespace {

training::ServiceOptions ToServiceOptions(const config::v1::CriticServerConfig& config,
                                          const RankEnvironment& environment) {
  training::ServiceOptions options;
  options.role = "critic";
  options.max_samples = config.max_samples();
  options.optimizer = config.optimizer();
  options.evaluation_tokens = training::EvaluationTokens(config, environment);
  options.blob_cache_bytes = config.server().blob_cache_bytes();
  return options;
}

}  // namespace

EngineOptions ToEngineOptions(const config::v1::CriticServerConfig& config,
                              const RankEnvironment& environment) {
  EngineOptions options;
  training::SetTrainingOptions(config, environment, &options);
  options.untie_embeddings = config.untie_embeddings();
  options.value_head_seed = config.value_head_seed();
  return options;
}

CriticApp::CriticApp(const config::v1::CriticServerConfig& config, rpc::ServerRuntime& runtime,
                     EngineFactory create_engine)
    : config_(config),
      environment_(runtime.environment),
      create_engine_(std::move(create_engine)),
      service_(ToServiceOptions(config, runtime.environment), runtime) {}

std::vector<rpc::NamedService> CriticApp::services() {
  if (environment_.rank > 0) return {};  // clients call rank 0
  return {{v1::CriticService::service_full_name(), &service_}, service_.blob_service()};
}

absl::Status CriticApp::Load() {
  EngineOptions options = ToEngineOptions(config_, environment_);
  options.on_checkpoint = [this](const auto& report) { service_.OnCheckpoint(report); };
  TANDEM_ASSIGN_OR_RETURN(engine_, create_engine_(options));
  service_.SetEngine(engine_.get());
  return absl::OkStatus();
}

void CriticApp::Stop() {
  if (engine_ == nullptr) return;
  // Rank 0 starts the save of all ranks.
  training::ShutDownEngine(*engine_,
                           environment_.rank == 0 ? config_.shutdown_checkpoint_directory() : "");
}

}  // namespace tandem::critic
