// The trainer server as an rpc::ServerApp: makes engine options from the configuration, and
// connects engine and service.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_APP_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_APP_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/steady_time.h"
#include "common/rpc/server/server_main.h"
#include "services/trainer/engine/engine.h"
#include "services/trainer/service/trainer_service.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::trainer {

// trainer::CreateEngine, or a fake engine in tests.
using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<Engine>>(
    const EngineOptions& options, std::shared_ptr<CriticConnection> critic)>;

// `config` must be resolved.
EngineOptions ToEngineOptions(const config::v1::TrainerServerConfig& config,
                              const RankEnvironment& environment);

class TrainerApp final : public rpc::ServerApp {
 public:
  // `runtime` outlives the app.
  TrainerApp(const config::v1::TrainerServerConfig& config, rpc::ServerRuntime& runtime,
             EngineFactory create_engine);

  std::vector<rpc::NamedService> services() override;
  absl::Status Load() override;
  absl::Status CheckHealth() override { return engine_->Health(); }
  void UpdateMetrics() override { service_.UpdateMetrics(); }
  void Drain(SteadyTime deadline) override;
  void Stop() override;
  bool Ended() const override { return engine_->ended(); }
  bool HasUnsavedState() const override { return engine_->unsaved(); }
  bool SavesStateOnStop() const override {
    return !config_.shutdown_checkpoint_directory().empty();
  }

  TrainerService& service() { return service_; }

 private:
  const config::v1::TrainerServerConfig config_;
  const rpc::ServerRuntime& runtime_;
  const EngineFactory create_engine_;
  std::unique_ptr<Engine> engine_;  // outlives the service
  TrainerService service_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_APP_H_
