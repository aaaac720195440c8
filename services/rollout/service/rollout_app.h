// The rollout server as an rpc::ServerApp: its services, its engine, its health and metrics.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_APP_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_APP_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/steady_time.h"
#include "common/rpc/server/server_main.h"
#include "common/rpc/transfer/blob_service.h"
#include "common/rpc/transfer/weight_receiver_service.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/service/rollout_service.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rollout {

// rollout::CreateEngine, or a fake engine in tests.
using EngineFactory =
    std::function<absl::StatusOr<std::unique_ptr<Engine>>(const EngineOptions& options)>;

class RolloutApp final : public rpc::ServerApp {
 public:
  // `config` must be resolved.
  RolloutApp(const config::v1::RolloutServerConfig& config, rpc::ServerRuntime& runtime,
             EngineFactory create_engine);

  std::vector<rpc::NamedService> services() override;
  absl::Status Load() override;
  absl::Status CheckHealth() override;
  void UpdateMetrics() override;
  void Drain(SteadyTime deadline) override;
  void Stop() override;
  bool Ended() const override { return engine_->ended(); }

 private:
  bool leads() const { return options_.environment.rank == 0; }

  const EngineOptions options_;
  const EngineFactory create_engine_;
  rpc::Metrics& metrics_;
  std::unique_ptr<Engine> engine_;  // outlives the services
  RolloutService rollout_service_;
  rpc::BlobService blob_service_;
  rpc::WeightReceiverService weight_service_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_APP_H_
