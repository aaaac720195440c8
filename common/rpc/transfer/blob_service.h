// tandem.blobs.v1.BlobService over a BlobStore.
#ifndef TANDEM_COMMON_RPC_TRANSFER_BLOB_SERVICE_H_
#define TANDEM_COMMON_RPC_TRANSFER_BLOB_SERVICE_H_

#include "common/rpc/calls/call_executor.h"
#include "common/rpc/metrics/metrics.h"
#include "common/rpc/transfer/blob_store.h"
#include "tandem/blobs/v1/blobs.grpc.pb.h"

namespace tandem::rpc {

// Every method with callbacks and bytes (stream_message.h).
using RawBlobService = blobs::v1::BlobService::WithRawCallbackMethod_FindMissingBlobs<
    blobs::v1::BlobService::WithRawCallbackMethod_UploadBlob<blobs::v1::BlobService::Service>>;

class BlobService final : public RawBlobService {
 public:
  // The executor and the store outlive the service.
  BlobService(CallExecutor& executor, BlobStore& store) : executor_(executor), store_(store) {}

  grpc::ServerUnaryReactor* FindMissingBlobs(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* UploadBlob(grpc::CallbackServerContext* context,
                                                        grpc::ByteBuffer* response) override;

 private:
  CallExecutor& executor_;
  BlobStore& store_;
};

// Sets the metrics of a store.
void UpdateBlobMetrics(const BlobStore& store, Metrics& metrics);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TRANSFER_BLOB_SERVICE_H_
