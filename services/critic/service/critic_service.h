// tandem.critic.v1.CriticService over a critic engine: checks and converts messages, runs engine
// calls on the executor, reports. No tensors.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/rpc/byte_budget.h"
#include "common/rpc/call_executor.h"
#include "common/rpc/engine_turn.h"
#include "common/rpc/metrics.h"
#include "services/critic/engine/engine.h"
#include "tandem/critic/v1/critic.grpc.pb.h"

namespace tandem::critic {

struct CriticServiceOptions {
  int64_t max_samples = 4096;
  // Samples of steps that are being received or trained, of all calls together.
  int64_t max_buffered_bytes = int64_t{1} << 30;
  absl::Time start_time = absl::Now();
};

class CriticService final : public v1::CriticService::CallbackService {
 public:
  // `executor` and `metrics` must outlive the service.
  CriticService(const CriticServiceOptions& options, rpc::CallExecutor& executor,
                rpc::Metrics& metrics);

  // Before the executor's gate opens; `engine` must outlive the calls.
  void SetEngine(Engine* engine) { engine_ = engine; }
  // Refreshes gauges from the engine's info.
  void UpdateMetrics();

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerBidiReactor<v1::ComputeValuesRequest, v1::ComputeValuesResponse>* ComputeValues(
      grpc::CallbackServerContext* context) override;
  grpc::ServerReadReactor<v1::TrainStepRequest>* TrainStep(
      grpc::CallbackServerContext* context, v1::TrainStepResponse* response) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const v1::SaveCheckpointRequest* request,
                                           v1::SaveCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* LoadCheckpoint(grpc::CallbackServerContext* context,
                                           const v1::LoadCheckpointRequest* request,
                                           v1::LoadCheckpointResponse* response) override;
  grpc::ServerUnaryReactor* ExportModel(grpc::CallbackServerContext* context,
                                        const v1::ExportModelRequest* request,
                                        v1::ExportModelResponse* response) override;

  int64_t buffered_bytes() const { return budget_.used_bytes(); }

 private:
  class TrainStepCall;

  absl::StatusOr<v1::TrainStepResponse> RunTrainStep(const TrainStepRequest& request,
                                                     const rpc::CallContext& context);

  const CriticServiceOptions options_;
  rpc::CallExecutor& executor_;
  rpc::Metrics& metrics_;
  rpc::ByteBudget budget_;
  rpc::EngineTurn turn_;
  Engine* engine_ = nullptr;
};

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_
