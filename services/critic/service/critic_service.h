// tandem.critic.v1.CriticService over a critic engine: checks and converts messages, runs engine
// calls on the executor, and updates metrics. No tensors.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/metrics/metrics.h"
#include "services/critic/engine/engine.h"
#include "services/training_core/service/training_service.h"
#include "tandem/critic/v1/critic.grpc.pb.h"

namespace tandem::critic {

// All methods use callbacks, and requests that are bytes (stream_message.h).
using CriticCallbacks = v1::CriticService::WithRawCallbackMethod_GetServerInfo<
    v1::CriticService::WithRawCallbackMethod_ComputeValues<
        v1::CriticService::WithRawCallbackMethod_TrainStep<
            v1::CriticService::WithRawCallbackMethod_SaveCheckpoint<
                v1::CriticService::WithRawCallbackMethod_LoadCheckpoint<
                    v1::CriticService::WithRawCallbackMethod_ExportModel<
                        v1::CriticService::Service>>>>>>;

class CriticService final : public CriticCallbacks {
 public:
  // `runtime` must outlive the service.
  CriticService(const training::ServiceOptions& options, const rpc::ServerRuntime& runtime);

  // Before the executor's gate opens; `engine` must outlive the calls.
  void SetEngine(Engine* engine) {
    engine_ = engine;
    training_.SetEngine(engine);
  }
  // Logs and counts a checkpoint. Thread-safe.
  void OnCheckpoint(const training::CheckpointReport& report) { training_.OnCheckpoint(report); }
  // Refreshes gauges from the engine's info.
  void UpdateMetrics() { training_.UpdateMetrics(); }

  // Receives the pixels of images.
  rpc::NamedService blob_service() { return training_.blob_service(); }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeValues(
      grpc::CallbackServerContext* context) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* TrainStep(grpc::CallbackServerContext* context,
                                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SaveCheckpoint(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* LoadCheckpoint(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ExportModel(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

 private:
  class TrainStepCall;

  training::TrainingService training_;
  Engine* engine_ = nullptr;
};

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_CRITIC_SERVICE_H_
