#include "common/rpc/transfer/blob_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/stream_handlers.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/metrics/metric_names.h"

namespace tandem::rpc {
namespace {

using blobs::v1::FindMissingBlobsRequest;
using blobs::v1::FindMissingBlobsResponse;
using blobs::v1::UploadBlobRequest;
using blobs::v1::UploadBlobResponse;

// Copies chunks as they come.
class UploadCall final : public ClientStreamHandler<UploadBlobRequest, UploadBlobResponse> {
 public:
  explicit UploadCall(BlobStore& store) : store_(store) {}

  absl::Status OnMessage(const UploadBlobRequest& message) override {
    if (message.has_header()) {
      if (upload_ != nullptr) return InvalidField("header", "was sent twice");
      auto upload = store_.Begin(message.header().digest(), message.header().total_bytes());
      if (!upload.ok()) return PrependFieldPath("header", upload.status());
      upload_ = *std::move(upload);
      return absl::OkStatus();
    }
    if (upload_ == nullptr) return InvalidField("header", "must be the first message");
    return upload_->Append(message.chunk());
  }

  absl::StatusOr<UploadBlobResponse> OnEnd(const CallScope&) override {
    if (upload_ == nullptr) return InvalidField("header", "is required");
    TANDEM_RETURN_IF_ERROR(upload_->Finish());
    return UploadBlobResponse();
  }

 private:
  BlobStore& store_;
  std::unique_ptr<BlobStore::Upload> upload_;
};

}  // namespace

grpc::ServerUnaryReactor* BlobService::FindMissingBlobs(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return AnswerAtOnce<FindMissingBlobsRequest, FindMissingBlobsResponse>(
      executor_, context, request, response,
      [this](const FindMissingBlobsRequest& request) -> absl::StatusOr<FindMissingBlobsResponse> {
        const std::vector<std::string> digests(request.digests().begin(), request.digests().end());
        for (size_t i = 0; i < digests.size(); ++i) {
          TANDEM_RETURN_IF_ERROR(CheckBlobDigest(absl::StrCat("digests[", i, "]"), digests[i]));
        }
        FindMissingBlobsResponse response;
        for (std::string& digest : store_.FindMissing(digests)) {
          response.add_missing(std::move(digest));
        }
        return response;
      });
}

grpc::ServerReadReactor<grpc::ByteBuffer>* BlobService::UploadBlob(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return HandleClientStream<UploadBlobRequest, UploadBlobResponse>(
      executor_, context, response, std::make_unique<UploadCall>(store_));
}

void UpdateBlobMetrics(const BlobStore& store, Metrics& metrics) {
  const BlobStore::Stats stats = store.stats();
  metrics.Gauge(metric::kBlobCapacity).Set(static_cast<double>(stats.capacity_bytes));
  metrics.Gauge(metric::kBlobBytes).Set(static_cast<double>(stats.used_bytes));
  metrics.SetTotal(metric::kBlobBytesReceived, static_cast<double>(stats.received_bytes));
  metrics.SetTotal(metric::kBlobsDropped, static_cast<double>(stats.dropped_blobs));
}

}  // namespace tandem::rpc
