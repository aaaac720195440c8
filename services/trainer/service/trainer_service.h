// tandem.trainer.v1.TrainerService over a trainer engine: checks and converts messages, runs engine
// calls on the executor, and updates metrics. No tensors.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_SERVICE_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_SERVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/calls/broadcaster.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/transfer/weight_sender.h"
#include "services/trainer/engine/engine.h"
#include "services/training_core/service/training_service.h"
#include "tandem/trainer/v1/trainer.grpc.pb.h"

namespace tandem::trainer {

struct TrainerServiceOptions : training::ServiceOptions {
  int64_t micro_batch_tokens = 0;  // for GetServerInfo, like critic_address
  std::string critic_address;
  ObjectiveSupport support;
  bool has_speculator = false;  // whether a speculator trains beside the model
  bool freezes_model = false;   // whether the speculator trains alone
  config::v1::OptimizerOptions speculator_optimizer;  // resolved, with a speculator
  rpc::ChannelOptions publish_channel;
};

// All methods use callbacks, and messages that are bytes (stream_message.h).
using TrainerCallbacks = v1::TrainerService::WithRawCallbackMethod_GetServerInfo<
    v1::TrainerService::WithRawCallbackMethod_TrainStep<
        v1::TrainerService::WithRawCallbackMethod_ComputeLogProbs<
            v1::TrainerService::WithRawCallbackMethod_PublishWeights<
                v1::TrainerService::WithRawCallbackMethod_SaveCheckpoint<
                    v1::TrainerService::WithRawCallbackMethod_LoadCheckpoint<
                        v1::TrainerService::WithRawCallbackMethod_ExportModel<
                            v1::TrainerService::WithRawCallbackMethod_CheckObjective<
                                v1::TrainerService::WithRawCallbackMethod_WatchSteps<
                                    v1::TrainerService::Service>>>>>>>>>;

class TrainerService final : public TrainerCallbacks {
 public:
  // `runtime` must outlive the service.
  TrainerService(const TrainerServiceOptions& options, const rpc::ServerRuntime& runtime);

  // Before the executor's gate opens; `engine` must outlive the calls.
  void SetEngine(Engine* engine) {
    engine_ = engine;
    training_.SetEngine(engine);
  }
  // Ends WatchSteps streams, which would otherwise keep a draining server waiting.
  void Drain() { watchers_.Close(absl::UnavailableError("the server is draining")); }
  // Logs and counts a checkpoint. Thread-safe.
  void OnCheckpoint(const training::CheckpointReport& report) { training_.OnCheckpoint(report); }
  // Refreshes gauges from the engine's info.
  void UpdateMetrics() { training_.UpdateMetrics(); }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* TrainStep(grpc::CallbackServerContext* context,
                                                       grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLogProbs(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* PublishWeights(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
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
  grpc::ServerUnaryReactor* CheckObjective(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* WatchSteps(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request) override;

  // Receives the pixels of images.
  rpc::NamedService blob_service() { return training_.blob_service(); }

  size_t num_watchers() const { return watchers_.num_readers(); }
  int64_t buffered_bytes() { return training_.budget().used_bytes(); }

 private:
  class TrainStepCall;
  // Reports that wait for a watcher of WatchSteps.
  static constexpr size_t kMaxWaitingReports = 256;

  absl::StatusOr<v1::TrainStepResponse> RunTrainStep(const TrainStepRequest& request,
                                                     const CallScope& call);
  absl::StatusOr<v1::PublishWeightsResponse> Publish(const v1::PublishWeightsRequest& request,
                                                     const CallScope& call);

  // Takes the deliveries of a copy in the memory of a GPU: if nobody of those that may read it
  // there has done so, later ones are in a file, which receivers of the machine can read.
  void NoteWhetherRead(const std::vector<absl::StatusOr<rpc::WantedWeights>>& wanted,
                       const std::vector<absl::StatusOr<rpc::SentWeights>>& deliveries);

  const TrainerServiceOptions options_;
  rpc::CallExecutor& executor_;
  rpc::Metrics& metrics_;
  training::TrainingService training_;
  rpc::Broadcaster<v1::WatchStepsRequest, v1::WatchStepsResponse> watchers_{kMaxWaitingReports};
  Engine* engine_ = nullptr;
  std::atomic<bool> gpu_memory_is_read_ = true;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_TRAINER_SERVICE_H_
