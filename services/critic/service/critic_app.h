// The critic server as an rpc::ServerApp: makes engine options from the configuration, and connects
// engine and service.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_APP_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_APP_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/server/server_main.h"
#include "services/critic/engine/engine.h"
#include "services/critic/service/critic_service.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::critic {

// critic::CreateEngine, or a fake engine in tests.
using EngineFactory =
    std::function<absl::StatusOr<std::unique_ptr<Engine>>(const EngineOptions& options)>;

// `config` must be resolved.
EngineOptions ToEngineOptions(const config::v1::CriticServerConfig& config,
                              const RankEnvironment& environment);

class CriticApp final : public rpc::ServerApp {
 public:
  CriticApp(const config::v1::CriticServerConfig& config, rpc::ServerRuntime& runtime,
            EngineFactory create_engine);

  std::vector<rpc::NamedService> services() override;
  absl::Status Load() override;
  absl::Status CheckHealth() override { return engine_->Health(); }
  void UpdateMetrics() override { service_.UpdateMetrics(); }
  void Stop() override;
  bool Ended() const override { return engine_->ended(); }
  bool HasUnsavedState() const override { return engine_->unsaved(); }
  bool SavesStateOnStop() const override {
    return !config_.shutdown_checkpoint_directory().empty();
  }

 private:
  const config::v1::CriticServerConfig config_;
  const RankEnvironment environment_;
  const EngineFactory create_engine_;
  std::unique_ptr<Engine> engine_;  // outlives the service
  CriticService service_;
};

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_APP_H_
