// tandem.rollout.v1.RolloutService over an Engine.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "absl/time/time.h"
#include "common/coauthoring/tandem_config.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/server/server_main.h"
#include "common/rpc/transfer/blob_store.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/service/generate_stream.h"
#include "tandem/rollout/v1/rollout.grpc.pb.h"

namespace tandem::rollout {

struct RolloutServiceOptions {
  // Defaults for unset fields of a prompt's TandemConfig.
  TandemConfig tandem;
  // Limit for the samples of one batch of prompts: max_queue.
  int64_t max_batch_samples;
  // Limit for the bytes of prompts in incomplete batches, of all streams together.
  int64_t max_collected_bytes = 256 << 20;
  // Most bytes of pixels, where the model takes images.
  int64_t blob_cache_bytes = 0;
  // A stream without events for this long gets a heartbeat.
  absl::Duration heartbeat_interval = absl::Seconds(5);
};

// All methods use callbacks, and requests that are bytes (stream_message.h).
using RolloutCallbacks = v1::RolloutService::WithRawCallbackMethod_GetServerInfo<
    v1::RolloutService::WithRawCallbackMethod_Generate<
        v1::RolloutService::WithRawCallbackMethod_Score<
            v1::RolloutService::WithRawCallbackMethod_Pause<
                v1::RolloutService::WithRawCallbackMethod_Resume<v1::RolloutService::Service>>>>>;

class RolloutService final : public RolloutCallbacks {
 public:
  // `runtime` must outlive the service.
  RolloutService(const rpc::ServerRuntime& runtime, const RolloutServiceOptions& options);
  ~RolloutService() override;

  // Before the executor's gate opens. The engine must outlive the calls.
  void SetEngine(Engine* engine);

  // The pixels of images, which prompts name.
  rpc::BlobStore& blobs() { return blobs_; }

  // Refuses new prompts; a stream ends once none of its prompts runs.
  void Drain();

  int64_t open_streams() const;

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Generate(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Pause(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;

 private:
  class GenerateReactor;

  void Register(const std::shared_ptr<GenerateStream>& stream);
  void Unregister(const std::shared_ptr<GenerateStream>& stream);
  void Beat();

  const rpc::ServerRuntime& runtime_;
  rpc::CallExecutor& executor_;
  const RolloutServiceOptions options_;
  std::atomic<Engine*> engine_ = nullptr;
  rpc::BlobStore blobs_;
  std::atomic<uint64_t> last_stream_ = 0;
  rpc::ByteBudget collected_bytes_;

  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  bool draining_ = false;
  std::set<std::shared_ptr<GenerateStream>> streams_;
  std::thread heartbeat_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_
