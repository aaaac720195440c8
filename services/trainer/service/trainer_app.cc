#include "services/trainer/service/trainer_app.h"

#include <utility>

#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/rpc/client/channel.h"
#include "services/trainer/service/critic_connection.h"
#include "services/trainer/service/memory.h"
#include "services/trainer/service/objective_convert.h"
#include "services/trainer/service/speculator_config.h"
#include "services/training_core/service/training_config.h"

namespace tandem::trainer {
namespace {

TrainerServiceOptions ToServiceOptions(const config::v1::TrainerServerConfig& config,
                                       const RankEnvironment& environment) {
  TrainerServiceOptions options;
  options.role = "trainer";
  options.max_samples = config.max_samples();
  options.optimizer = config.optimizer();
  options.evaluation_tokens = training::EvaluationTokens(config, environment);
  options.blob_cache_bytes = config.server().blob_cache_bytes();
  options.micro_batch_tokens = config.batch().micro_batch_tokens();
  options.critic_address = config.critic_address();
  options.support = SupportOf(config);
  options.has_speculator = !config.speculator().adapter().empty();
  options.freezes_model = config.speculator().freeze_base_model();
  options.speculator_optimizer = config.speculator().optimizer();
  options.publish_channel = rpc::ToChannelOptions(config.server());
  return options;
}

}  // namespace

EngineOptions ToEngineOptions(const config::v1::TrainerServerConfig& config,
                              const RankEnvironment& environment) {
  EngineOptions options;
  training::SetTrainingOptions(config, environment, &options);
  options.reference_model = config.reference_model();
  options.junior_model = config.junior_model();
  options.teacher_model = config.teacher_model();
  options.loss_impl = config.batch().loss_impl();
  options.logits_chunk_bytes = config.batch().logits_chunk_bytes();
  options.speculator = ToSpeculatorSettings(config.speculator());
  options.freeze_base_model = config.speculator().freeze_base_model();
  options.speculator_optimizer = training::ToOptimizerOptions(config.speculator().optimizer());
  return options;
}

TrainerApp::TrainerApp(const config::v1::TrainerServerConfig& config, rpc::ServerRuntime& runtime,
                       EngineFactory create_engine)
    : config_(config),
      runtime_(runtime),
      create_engine_(std::move(create_engine)),
      service_(ToServiceOptions(config, runtime.environment), runtime) {}

std::vector<rpc::NamedService> TrainerApp::services() {
  if (runtime_.environment.rank > 0) return {};  // clients call rank 0
  return {{v1::TrainerService::service_full_name(), &service_}, service_.blob_service()};
}

absl::Status TrainerApp::Load() {
  std::shared_ptr<CriticConnection> critic;
  if (!config_.critic_address().empty()) {
    critic = MakeCriticConnection(
        rpc::MakeChannel(config_.critic_address(), rpc::ToChannelOptions(config_.server())));
  }
  EngineOptions options = ToEngineOptions(config_, runtime_.environment);
  options.weights_copy_bytes = runtime_.memory.bytes_of(kWeightsCopy);
  options.on_checkpoint = [this](const auto& report) { service_.OnCheckpoint(report); };
  TANDEM_ASSIGN_OR_RETURN(engine_, create_engine_(options, std::move(critic)));
  service_.SetEngine(engine_.get());
  return absl::OkStatus();
}

void TrainerApp::Drain(SteadyTime) { service_.Drain(); }

void TrainerApp::Stop() {
  if (engine_ == nullptr) return;
  // Rank 0 starts the save of all ranks.
  training::ShutDownEngine(
      *engine_, runtime_.environment.rank == 0 ? config_.shutdown_checkpoint_directory() : "");
}

}  // namespace tandem::trainer
