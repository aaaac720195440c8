#include "common/rpc/transfer/weight_receiver_service.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/shared_file.h"
#include "common/base/logging.h"
#include "common/rpc/calls/stream_handlers.h"
#include "common/rpc/calls/unary_handler.h"
#include "common/rpc/convert/proto_convert.h"

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
  if (id.empty()) return InvalidField("update_id", "is required");
  if (id.size() > kMaxUpdateIdBytes) {
    return InvalidField("update_id", absl::StrCat("has ", id.size(), " bytes, at most ",
                                                  kMaxUpdateIdBytes, " are allowed"));
  }
  return absl::OkStatus();
}

}  // namespace

// Checks chunks as they come; they are small, and the receiver only copies them.
class WeightReceiverService::Upload final
    : public ClientStreamHandler<UploadWeightsRequest, UploadWeightsResponse> {
 public:
  explicit Upload(WeightReceiverService* service) : service_(service) {}

  absl::Status OnMessage(const UploadWeightsRequest& chunk) override {
    if (chunk.has_shared_file()) {
      TANDEM_RETURN_IF_ERROR(
          Share("shared_file", OpenShared(SharedFileFromProto(chunk.shared_file()))));
    } else if (const auto memories = GpuMemoriesFromProto(chunk); !memories.empty()) {
      TANDEM_RETURN_IF_ERROR(Share("gpu_memory", receiver().OpenGpuMemory(memories)));
    }
    return chunk.ranges_size() > 0 ? TakeRanges(chunk) : TakeData(chunk);
  }

  absl::StatusOr<UploadWeightsResponse> OnEnd(const CallScope&) override {
    if (!next_chunk_.has_value()) return InvalidField("chunk_index", "no chunk was sent");
    UploadWeightsResponse response;
    response.set_next_chunk(*next_chunk_);
    return response;
  }

 private:
  absl::Status TakeData(const UploadWeightsRequest& chunk) {
    const std::string& data = chunk.data();
    if (Xxh3_64(data.data(), data.size()) != chunk.checksum()) {
      return WithReason(FieldError(absl::StatusCode::kDataLoss, "data",
                                   absl::StrCat("chunk ", chunk.chunk_index(),
                                                " does not match its checksum; send it again")),
                        reason::kChunkDamaged);
    }
    TANDEM_ASSIGN_OR_RETURN(
        next_chunk_,
        receiver().Append(
            chunk.update_id(), chunk.chunk_index(),
            absl::MakeConstSpan(reinterpret_cast<const std::byte*>(data.data()), data.size())));
    Count("stream", static_cast<int64_t>(data.size()));
    return absl::OkStatus();
  }

  // Takes what was opened for the ranges of the stream; `field` names it in an error.
  absl::Status Share(const char* field, absl::StatusOr<std::shared_ptr<const SharedBytes>> opened) {
    if (!opened.ok()) {
      return FieldError(absl::StatusCode::kFailedPrecondition, field, opened.status().message());
    }
    shared_ = *std::move(opened);
    return absl::OkStatus();
  }

  absl::Status TakeRanges(const UploadWeightsRequest& chunk) {
    if (shared_ == nullptr) {
      return InvalidField("ranges", "the stream has neither shared_file nor gpu_memory");
    }
    if (!chunk.data().empty()) return InvalidField("ranges", "the chunk has data, too");
    std::vector<FileRange> ranges;
    int64_t size = 0;
    for (const auto& range : chunk.ranges()) {
      const std::string field = absl::StrCat("ranges[", ranges.size(), "].");
      if (range.offset() < 0) return InvalidField(field + "offset", "must not be negative");
      if (range.size() < 1 || range.size() > kMaxChunkBytes - size) {
        return InvalidField(field + "size",
                            absl::StrCat("a chunk has 1 to ", kMaxChunkBytes, " bytes"));
      }
      size += range.size();
      ranges.push_back({.offset = range.offset(), .size = range.size()});
    }
    TANDEM_ASSIGN_OR_RETURN(
        next_chunk_,
        receiver().AppendShared(chunk.update_id(), chunk.chunk_index(), shared_, ranges));
    Count(shared_->on_gpu() ? "gpu" : "file", size);
    return absl::OkStatus();
  }

  WeightReceiver& receiver() const { return *service_->receiver_.load(); }
  void Count(const char* transport, int64_t bytes) {
    service_->metrics_.Counter(metric::kWeightBytesReceived, {transport})
        .Increment(static_cast<double>(bytes));
  }

  WeightReceiverService* const service_;
  std::optional<int64_t> next_chunk_;
  std::shared_ptr<const SharedBytes> shared_;  // of the ranges
};

grpc::ServerUnaryReactor* WeightReceiverService::BeginUpdate(grpc::CallbackServerContext* context,
                                                             const grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* response) {
  return HandleUnary<BeginUpdateRequest, BeginUpdateResponse>(
      executor_, context, request, response,
      [this](const BeginUpdateRequest& request,
             const CallScope&) -> absl::StatusOr<BeginUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        absl::StatusOr<WeightManifest> manifest = WeightManifestFromProto(request.manifest());
        if (!manifest.ok()) return PrependFieldPath("manifest", manifest.status());
        TANDEM_ASSIGN_OR_RETURN(
            const int64_t next_chunk,
            receiver_.load()->Begin(request.update_id(), *manifest, request.allow_rollback()));
        BeginUpdateResponse response;
        response.set_next_chunk(next_chunk);
        response.set_opens_shared_file(request.has_shared_file() &&
                                       OpenShared(SharedFileFromProto(request.shared_file())).ok());
        std::string refused;
        if (const auto memories = GpuMemoriesFromProto(request); !memories.empty()) {
          const absl::Status opened = receiver_.load()->OpenGpuMemory(memories).status();
          response.set_opens_gpu_memory(opened.ok());
          refused = std::string(opened.message());
        }
        const char* const transport = response.opens_gpu_memory()    ? "gpu"
                                      : response.opens_shared_file() ? "file"
                                                                     : "stream";
        Log(LogLevel::kInfo, "weight_update_begun",
            {{"update_id", request.update_id()},
             {"version", manifest->version},
             {"next_chunk", next_chunk},
             {"transport", transport}});
        if (!refused.empty()) {
          Log(LogLevel::kWarning, "gpu_memory_refused",
              {{"update_id", request.update_id()}, {"message", refused}});
        }
        return response;
      });
}

grpc::ServerReadReactor<grpc::ByteBuffer>* WeightReceiverService::UploadWeights(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return HandleClientStream<UploadWeightsRequest, UploadWeightsResponse>(
      executor_, context, response, std::make_unique<Upload>(this));
}

grpc::ServerUnaryReactor* WeightReceiverService::CommitUpdate(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  return HandleUnary<CommitUpdateRequest, CommitUpdateResponse>(
      executor_, context, request, response,
      [this](const CommitUpdateRequest& request,
             const CallScope& context) -> absl::StatusOr<CommitUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        const absl::StatusOr<WeightsVersion> version =
            receiver_.load()->Commit(request.update_id(), context);
        metrics_.Counter(metric::kWeightUpdates, {version.ok() ? "committed" : "failed"})
            .Increment();
        if (!version.ok()) return version.status();
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
                                                             const grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* response) {
  return HandleUnary<AbortUpdateRequest, AbortUpdateResponse>(
      executor_, context, request, response,
      [this](const AbortUpdateRequest& request,
             const CallScope&) -> absl::StatusOr<AbortUpdateResponse> {
        TANDEM_RETURN_IF_ERROR(CheckUpdateId(request.update_id()));
        TANDEM_RETURN_IF_ERROR(receiver_.load()->Abort(request.update_id()));
        return AbortUpdateResponse();
      });
}

grpc::ServerUnaryReactor* WeightReceiverService::GetVersion(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return AnswerAtOnce<GetVersionRequest, GetVersionResponse>(
      executor_, context, request, response,
      [this](const GetVersionRequest& request) -> absl::StatusOr<GetVersionResponse> {
        GetVersionResponse response;
        WeightsVersionToProto(receiver_.load()->Version(), response.mutable_weights());
        response.set_open_update_id(receiver_.load()->OpenUpdateId());
        for (const absl::string_view name : kWeightComponents) {
          const auto version = receiver_.load()->ComponentVersion(name);
          if (!version.has_value()) continue;
          auto* component = response.add_components();
          component->set_name(std::string(name));
          WeightsVersionToProto(*version, component->mutable_weights());
        }
        if (request.with_tensor_types()) {
          for (const auto& [name, dtype] : receiver_.load()->WantedTypes()) {
            auto* type = response.add_tensor_types();
            type->set_name(name);
            type->set_dtype(DTypeToProto(dtype));
          }
          if (receiver_.load()->ReadsGpuMemory()) response.set_gpu_machine(MachineId());
        }
        return response;
      });
}

}  // namespace tandem::rpc
