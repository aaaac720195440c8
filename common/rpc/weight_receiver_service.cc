#include "common/rpc/weight_receiver_service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/rpc/proto_convert.h"
#include "common/rpc/stream_handlers.h"
#include "common/rpc/unary_handler.h"
#include "common/tensor/checksum.h"

namespace tandem::rpc {
namespace {

using weights::v1::AbortUpdateRequest;
using weights::v1::AbortUpdateResponse;
using weights::v1::BeginUpdateRequest;
using weights::v1::BeginUpdateResponse;
using weights::v1::CommitUpdateRequest;
using weights::v1::CommitUpdateResponse;
using weights::v1::GetVersionRequest;
using weights::v1::GetVersionResponse;
using weights::v1::UploadWeightsRequest;
using weights::v1::UploadWeightsResponse;

constexpr size_t kMaxUpdateIdBytes = 128;

absl::Status CheckUpdateId(const std::string& id) {
  if (id.empty()) return InvalidField("update_id", "required");
  if (id.size() > kMaxUpdateIdBytes) return InvalidField("update_id", "at most 128 bytes");
  return absl::OkStatus();
}

int64_t ChunksHeld(int64_t held_bytes, int64_t total_bytes, int64_t chunk_bytes) {
  return held_bytes == total_bytes ? (total_bytes + chunk_bytes - 1) / chunk_bytes
                                   : held_bytes / chunk_bytes;
}

}  // namespace

// Checks chunks as they come; they are small, and the receiver only copies them.
class WeightReceiverService::Upload final
    : public ClientStreamHandler<UploadWeightsRequest, UploadWeightsResponse> {
 public:
  explicit Upload(WeightReceiverService* service) : service_(service) {}

  absl::Status OnMessage(UploadWeightsRequest&& chunk) override {
    std::lock_guard lock(service_->mutex_);
    OpenUpdate& open = service_->open_;
    if (open.id.empty() || chunk.update_id() != open.id) {
      return absl::NotFoundError(
          absl::StrCat("update \"", chunk.update_id(), "\" is not open: call BeginUpdate first"));
    }
    const int64_t next = ChunksHeld(open.held_bytes, open.total_bytes, open.chunk_bytes);
    if (chunk.chunk_index() != next) {
      return WithReason(InvalidField("chunk_index", absl::StrCat("expected chunk ", next, ", got ",
                                                                 chunk.chunk_index())),
                        reason::kChunkOutOfOrder);
    }
    const int64_t expected = std::min(open.chunk_bytes, open.total_bytes - open.held_bytes);
    const auto size = static_cast<int64_t>(chunk.data().size());
    if (expected <= 0 || size != expected) {
      return InvalidField(
          "data", absl::StrCat("chunk ", next, " must hold ", expected, " bytes, holds ", size));
    }
    if (Xxh3_64(chunk.data().data(), chunk.data().size()) != chunk.checksum()) {
      return WithReason(
          FieldError(absl::StatusCode::kDataLoss, "data",
                     absl::StrCat("chunk ", next, " does not match its checksum; send it again")),
          reason::kChunkDamaged);
    }
    TANDEM_RETURN_IF_ERROR(service_->receiver_.load()->Append(
        open.id, open.held_bytes,
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(chunk.data().data()),
                            chunk.data().size())));
    open.held_bytes += size;
    next_chunk_ = next + 1;
    service_->metrics_.Counter(metric::kWeightBytesReceived).Increment(static_cast<double>(size));
    return absl::OkStatus();
  }

  absl::StatusOr<UploadWeightsResponse> OnEnd(const CallContext&) override {
    UploadWeightsResponse response;
    if (next_chunk_ >= 0) {
      response.set_next_chunk(next_chunk_);
    } else {
      std::lock_guard lock(service_->mutex_);
      const OpenUpdate& open = service_->open_;
      if (open.id.empty()) return absl::NotFoundError("no update is open");
      response.set_next_chunk(ChunksHeld(open.held_bytes, open.total_bytes, open.chunk_bytes));
    }
    return response;
  }

 private:
  WeightReceiverService* const service_;
  int64_t next_chunk_ = -1;
};

grpc::ServerUnaryReactor* WeightReceiverService::BeginUpdate(grpc::CallbackServerContext* context,
                                                             const BeginUpdateRequest* request,
                                                             BeginUpdateResponse* response) {
  return HandleUnary<BeginUpdateRequest, BeginUpdateResponse>(
      executor_, context, request, response,
      [this](const BeginUpdateRequest& request,
             const CallContext&) -> absl::StatusOr<BeginUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        const int64_t chunk_bytes = request.manifest().chunk_bytes();
        if (chunk_bytes < 1 || chunk_bytes > kMaxChunkBytes) {
          return InvalidField("manifest.chunk_bytes",
                              absl::StrCat("must be in [1, ", kMaxChunkBytes, "]"));
        }
        absl::StatusOr<WeightManifest> manifest = WeightManifestFromProto(request.manifest());
        if (!manifest.ok()) return PrependFieldPath("manifest", manifest.status());

        std::lock_guard lock(mutex_);
        if (open_.id == request.update_id() && open_.held_bytes > 0 &&
            open_.chunk_bytes != chunk_bytes &&
            receiver_.load()->OpenUpdateId() == request.update_id()) {
          return InvalidField("manifest.chunk_bytes",
                              absl::StrCat("the open update has ", open_.chunk_bytes));
        }
        TANDEM_ASSIGN_OR_RETURN(const int64_t held,
                                receiver_.load()->Begin(request.update_id(), *manifest));
        open_ = {request.update_id(), manifest->total_bytes, chunk_bytes, held};
        Log(LogLevel::kInfo, "weight_update_begun",
            {{"update_id", open_.id}, {"version", manifest->version}, {"held_bytes", held}});
        BeginUpdateResponse response;
        response.set_next_chunk(ChunksHeld(held, open_.total_bytes, chunk_bytes));
        return response;
      });
}

grpc::ServerReadReactor<UploadWeightsRequest>* WeightReceiverService::UploadWeights(
    grpc::CallbackServerContext* context, UploadWeightsResponse* response) {
  return HandleClientStream<UploadWeightsRequest, UploadWeightsResponse>(
      executor_, context, response, std::make_unique<Upload>(this));
}

grpc::ServerUnaryReactor* WeightReceiverService::CommitUpdate(grpc::CallbackServerContext* context,
                                                              const CommitUpdateRequest* request,
                                                              CommitUpdateResponse* response) {
  return HandleUnary<CommitUpdateRequest, CommitUpdateResponse>(
      executor_, context, request, response,
      [this](const CommitUpdateRequest& request,
             const CallContext&) -> absl::StatusOr<CommitUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        const absl::StatusOr<WeightsVersion> version =
            receiver_.load()->Commit(request.update_id());
        metrics_.Counter(metric::kWeightUpdates, {version.ok() ? "committed" : "failed"})
            .Increment();
        if (!version.ok()) return version.status();
        {
          std::lock_guard lock(mutex_);
          if (open_.id == request.update_id()) open_ = {};
        }
        metrics_.Gauge(metric::kWeightsVersion).Set(static_cast<double>(version->version));
        Log(LogLevel::kInfo, "weights_committed",
            {{"update_id", request.update_id()},
             {"version", version->version},
             {"digest", version->digest}});
        CommitUpdateResponse response;
        WeightsVersionToProto(*version, response.mutable_weights());
        return response;
      });
}

grpc::ServerUnaryReactor* WeightReceiverService::AbortUpdate(grpc::CallbackServerContext* context,
                                                             const AbortUpdateRequest* request,
                                                             AbortUpdateResponse* response) {
  return HandleUnary<AbortUpdateRequest, AbortUpdateResponse>(
      executor_, context, request, response,
      [this](const AbortUpdateRequest& request,
             const CallContext&) -> absl::StatusOr<AbortUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        std::lock_guard lock(mutex_);
        TANDEM_RETURN_IF_ERROR(receiver_.load()->Abort(request.update_id()));
        if (open_.id == request.update_id()) open_ = {};
        return AbortUpdateResponse();
      });
}

grpc::ServerUnaryReactor* WeightReceiverService::GetVersion(grpc::CallbackServerContext* context,
                                                            const GetVersionRequest*,
                                                            GetVersionResponse* response) {
  return AnswerAtOnce<GetVersionResponse>(
      executor_, context, response, [this]() -> absl::StatusOr<GetVersionResponse> {
        GetVersionResponse response;
        WeightsVersionToProto(receiver_.load()->Version(), response.mutable_weights());
        response.set_open_update_id(receiver_.load()->OpenUpdateId());
        return response;
      });
}

}  // namespace tandem::rpc
