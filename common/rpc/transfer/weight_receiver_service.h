// tandem.weights.v1.WeightService over a WeightReceiver.
#ifndef TANDEM_COMMON_RPC_TRANSFER_WEIGHT_RECEIVER_SERVICE_H_
#define TANDEM_COMMON_RPC_TRANSFER_WEIGHT_RECEIVER_SERVICE_H_

#include <atomic>
#include <cstdint>

#include "common/rpc/calls/call_executor.h"
#include "common/rpc/metrics/metrics.h"
#include "common/weights/weight_transfer.h"
#include "tandem/weights/v1/weights.grpc.pb.h"

namespace tandem::rpc {

// Every method with callbacks and bytes (stream_message.h).
using RawWeightService = weights::v1::WeightService::WithRawCallbackMethod_BeginUpdate<
    weights::v1::WeightService::WithRawCallbackMethod_UploadWeights<
        weights::v1::WeightService::WithRawCallbackMethod_CommitUpdate<
            weights::v1::WeightService::WithRawCallbackMethod_AbortUpdate<
                weights::v1::WeightService::WithRawCallbackMethod_GetVersion<
                    weights::v1::WeightService::Service>>>>>;

// Checks the XXH3-64 of every chunk before the receiver sees it: a damaged one is DATA_LOSS and
// leaves the update open. A chunk whose bytes are in the sender's file, or in memory of its GPU, is
// read there.
class WeightReceiverService final : public RawWeightService {
 public:
  WeightReceiverService(CallExecutor& executor, Metrics& metrics)
      : executor_(executor), metrics_(metrics) {
    // The counters exist from the start, for alerts.
    for (const char* result : {"committed", "failed"}) {
      metrics.Counter(metric::kWeightUpdates, {result});
    }
    for (const char* transport : {"stream", "file", "gpu"}) {
      metrics.Counter(metric::kWeightBytesReceived, {transport});
    }
  }

  // Before the executor's gate opens. `receiver` must outlive the calls.
  void SetReceiver(WeightReceiver* receiver) { receiver_ = receiver; }

  grpc::ServerUnaryReactor* BeginUpdate(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* UploadWeights(grpc::CallbackServerContext* context,
                                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CommitUpdate(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* AbortUpdate(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetVersion(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;

 private:
  class Upload;

  CallExecutor& executor_;
  Metrics& metrics_;
  std::atomic<WeightReceiver*> receiver_ = nullptr;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TRANSFER_WEIGHT_RECEIVER_SERVICE_H_
