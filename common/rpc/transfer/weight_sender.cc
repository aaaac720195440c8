#include "common/rpc/transfer/weight_sender.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/client/retry.h"
#include "common/rpc/convert/proto_convert.h"

namespace tandem::rpc {
namespace {

using weights::v1::WeightService;

class Sender {
 public:
  Sender(WeightService::StubInterface& receiver, const std::string& update_id,
         const WeightSource& source, const WeightSenderOptions& options)
      : receiver_(receiver), update_id_(update_id), source_(source), options_(options) {}

  // One attempt, from wherever the receiver is.
  absl::StatusOr<SentWeights> Attempt() {
    progressed_ = false;
    weights::v1::GetVersionResponse served;
    CallContext context(options_.call, options_.version_timeout);
    TANDEM_RETURN_IF_ERROR(FromGrpcStatus(receiver_.GetVersion(context.get(), {}, &served)));
    const bool has_speculator = served.has_speculator();
    ChooseParts(served);
    if (Serves(served)) {
      return SentWeights{.weights = WeightsVersionFromProto(served.weights()),
                         .has_speculator = has_speculator,
                         .bytes = furthest_chunk_ > 0 ? sent_bytes_ : 0};
    }
    sent_bytes_ = manifest_.total_bytes;
    TANDEM_ASSIGN_OR_RETURN(const int64_t next_chunk, Begin());
    progressed_ = next_chunk > furthest_chunk_;
    furthest_chunk_ = std::max(furthest_chunk_, next_chunk);
    TANDEM_RETURN_IF_ERROR(Upload(next_chunk));
    TANDEM_ASSIGN_OR_RETURN(WeightsVersion committed, Commit());
    return SentWeights{.weights = std::move(committed),
                       .has_speculator = has_speculator,
                       .bytes = manifest_.total_bytes};
  }
  // Frees the receiver of the update, if one was begun; the receiver may be gone.
  void Abort() {
    if (!begun_) return;
    weights::v1::AbortUpdateRequest request;
    request.set_update_id(update_id_);
    weights::v1::AbortUpdateResponse response;
    CallContext context(CallScope{}, options_.version_timeout);
    receiver_.AbortUpdate(context.get(), request, &response);
  }
  // Whether the last attempt found more at the receiver than any before it.
  bool progressed() const { return progressed_; }

 private:
  // Leaves out what the receiver cannot take, and a model that it serves, under any version.
  void ChooseParts(const weights::v1::GetVersionResponse& served) {
    const WeightManifest& whole = source_.manifest();
    manifest_ = served.has_speculator() ? whole : whole.ModelAlone();
    first_byte_ = 0;
    if (served.weights().digest() != whole.digest) return;
    first_byte_ = whole.model_bytes();
    manifest_ = manifest_.WithoutModel();
  }

  // Whether the receiver serves exactly what would be sent to it.
  bool Serves(const weights::v1::GetVersionResponse& served) const {
    const auto same = [&](const types::v1::WeightsVersion& version, const std::string& digest) {
      return version.version() == manifest_.version && version.digest() == digest;
    };
    return same(served.weights(), manifest_.digest) &&
           (!manifest_.speculator.has_value() ||
            same(served.speculator(), manifest_.speculator->digest));
  }

  absl::StatusOr<int64_t> Begin() {
    weights::v1::BeginUpdateRequest request;
    request.set_update_id(update_id_);
    request.set_allow_rollback(options_.allow_rollback);
    WeightManifestToProto(manifest_, request.mutable_manifest());
    weights::v1::BeginUpdateResponse response;
    CallContext context(options_.call, options_.rpc_timeout);
    TANDEM_RETURN_IF_ERROR(
        FromGrpcStatus(receiver_.BeginUpdate(context.get(), request, &response)));
    if (response.next_chunk() < 0 || response.next_chunk() > manifest_.num_chunks()) {
      return absl::InternalError(
          absl::StrCat("the receiver asks for chunk ", response.next_chunk()));
    }
    begun_ = true;
    return response.next_chunk();
  }

  absl::Status Upload(int64_t next_chunk) {
    const WeightManifest& manifest = manifest_;
    const int64_t num_chunks = manifest.num_chunks();
    if (next_chunk == num_chunks) return absl::OkStatus();
    weights::v1::UploadWeightsResponse response;
    CallContext context(options_.call, options_.rpc_timeout);
    const auto stream = receiver_.UploadWeights(context.get(), &response);
    weights::v1::UploadWeightsRequest chunk;
    chunk.set_update_id(update_id_);
    absl::Status read;
    for (int64_t index = next_chunk; index < num_chunks; ++index) {
      const int64_t offset = index * manifest.chunk_bytes;
      const int64_t size = std::min(manifest.chunk_bytes, manifest.total_bytes - offset);
      std::string& data = *chunk.mutable_data();
      data.resize(static_cast<size_t>(size));
      read = source_.Read(first_byte_ + offset,
                          absl::MakeSpan(reinterpret_cast<std::byte*>(data.data()), data.size()));
      if (!read.ok()) {
        context.get()->TryCancel();
        break;
      }
      chunk.set_chunk_index(index);
      chunk.set_checksum(Xxh3_64(data.data(), data.size()));
      if (!stream->Write(chunk)) break;  // Finish says why
    }
    stream->WritesDone();
    const absl::Status sent = FromGrpcStatus(stream->Finish());
    // Not what the receiver says of it: sending again would not help.
    if (!read.ok()) return absl::InternalError(absl::StrCat("weights to send: ", read.message()));
    TANDEM_RETURN_IF_ERROR(sent);
    if (response.next_chunk() != num_chunks) {
      return absl::UnavailableError(absl::StrCat("the receiver holds ", response.next_chunk(),
                                                 " of ", num_chunks, " chunks"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<WeightsVersion> Commit() {
    weights::v1::CommitUpdateRequest request;
    request.set_update_id(update_id_);
    weights::v1::CommitUpdateResponse response;
    CallContext context(options_.call, options_.rpc_timeout);
    TANDEM_RETURN_IF_ERROR(
        FromGrpcStatus(receiver_.CommitUpdate(context.get(), request, &response)));
    const WeightManifest& manifest = manifest_;
    WeightsVersion committed = WeightsVersionFromProto(response.weights());
    if (committed != WeightsVersion{manifest.version, manifest.digest}) {
      return WithReason(
          absl::DataLossError(absl::StrCat("the receiver committed version ", committed.version,
                                           " with digest ", committed.digest, ", not version ",
                                           manifest.version, " with digest ", manifest.digest)),
          reason::kDigestMismatch);
    }
    return committed;
  }

  WeightService::StubInterface& receiver_;
  const std::string& update_id_;
  const WeightSource& source_;
  const WeightSenderOptions& options_;
  WeightManifest manifest_;  // of what this receiver is sent
  int64_t first_byte_ = 0;   // of that in the source's stream
  int64_t sent_bytes_ = 0;   // of the last attempt that began an update
  int64_t furthest_chunk_ = 0;
  bool progressed_ = false;
  bool begun_ = false;
};

bool Retryable(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kNotFound:  // the receiver restarted: begin again
      return true;
    case absl::StatusCode::kDataLoss:
      return !HasReason(status, reason::kDigestMismatch);
    default:
      return false;
  }
}

}  // namespace

absl::StatusOr<SentWeights> SendWeights(WeightService::StubInterface& receiver,
                                        const std::string& update_id, const WeightSource& source,
                                        const WeightSenderOptions& options) {
  Sender sender(receiver, update_id, source, options);
  absl::Duration backoff = options.backoff;
  for (int attempt = 1;; ++attempt) {
    absl::StatusOr<SentWeights> result = sender.Attempt();
    if (sender.progressed()) {
      attempt = 1;
      backoff = options.backoff;
    }
    if (result.ok()) return result;
    // A caller that is gone may come back and go on with the update.
    TANDEM_RETURN_IF_ERROR(options.call.Check());
    if (!Retryable(result.status()) || attempt >= options.max_attempts) {
      sender.Abort();
      return result;
    }
    Log(LogLevel::kWarning, "weight_upload_retry",
        {{"update_id", update_id},
         {"attempt", attempt},
         {"code", absl::StatusCodeToString(result.status().code())},
         {"message", result.status().message()}});
    TANDEM_RETURN_IF_ERROR(SleepUnlessOver(options.call, backoff));
    backoff *= 2;
  }
}

}  // namespace tandem::rpc
