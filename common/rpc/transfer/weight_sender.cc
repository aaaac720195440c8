#include "common/rpc/transfer/weight_sender.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/shared_file.h"
#include "common/base/logging.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/client/retry.h"
#include "common/rpc/convert/proto_convert.h"

namespace tandem::rpc {
namespace {

using weights::v1::UploadWeightsRequest;
using weights::v1::WeightService;

absl::StatusOr<weights::v1::GetVersionResponse> AskVersion(WeightService::StubInterface& receiver,
                                                           const WeightSenderOptions& options) {
  weights::v1::GetVersionRequest request;
  request.set_with_tensor_types(true);
  weights::v1::GetVersionResponse served;
  CallContext context(options.call, options.version_timeout);
  TANDEM_RETURN_IF_ERROR(FromGrpcStatus(receiver.GetVersion(context.get(), request, &served)));
  return served;
}

// Returns the types that this sender can send: a type that it does not know is left out, as any
// tensor may travel as float32.
TensorTypes TypesFromProto(const weights::v1::GetVersionResponse& served) {
  TensorTypes types;
  for (const auto& type : served.tensor_types()) {
    if (type.dtype() == types::v1::DATA_TYPE_BFLOAT16) types[type.name()] = DType::kBFloat16;
  }
  return types;
}

class Sender {
 public:
  Sender(WeightService::StubInterface& receiver, const std::string& update_id,
         const WeightSource& source, const WeightSenderOptions& options)
      : receiver_(receiver), update_id_(update_id), source_(source), options_(options) {}

  // One attempt, from wherever the receiver is.
  absl::StatusOr<SentWeights> Attempt() {
    progressed_ = false;
    TANDEM_ASSIGN_OR_RETURN(const weights::v1::GetVersionResponse served,
                            AskVersion(receiver_, options_));
    SentWeights sent = {.weights = WeightsVersionFromProto(served.weights())};
    for (const auto& component : served.components()) {
      sent.components[component.name()] = WeightsVersionFromProto(component.weights());
    }
    TANDEM_RETURN_IF_ERROR(ChooseTensors(sent, TypesFromProto(served)));
    if (Serves(sent)) {
      sent.bytes = furthest_chunk_ > 0 ? sent_bytes_ : 0;
      sent.transport = transport_;
      return sent;
    }
    sent_bytes_ = manifest_.total_bytes;
    TANDEM_ASSIGN_OR_RETURN(const int64_t next_chunk, Begin());
    transport_ = shares_gpu()                ? SentWeights::Transport::kGpu
                 : shares_.has_shared_file() ? SentWeights::Transport::kFile
                                             : SentWeights::Transport::kStream;
    sent.transport = transport_;
    progressed_ = next_chunk > furthest_chunk_;
    furthest_chunk_ = std::max(furthest_chunk_, next_chunk);
    TANDEM_RETURN_IF_ERROR(Upload(next_chunk));
    TANDEM_ASSIGN_OR_RETURN(sent.weights, Commit());
    sent.bytes = manifest_.total_bytes;
    return sent;
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
  struct Range {
    int64_t begin, end;
  };

  // Leaves out the components that the receiver does not take, and a model that it serves, under
  // any version. Chooses the type of each tensor that is sent.
  absl::Status ChooseTensors(const SentWeights& served, const TensorTypes& types) {
    const WeightManifest& whole = source_.manifest();
    manifest_ = whole;
    for (const ComponentManifest& component : whole.components) {
      if (!served.components.contains(component.name)) {
        manifest_ = manifest_.Without(component.name);
      }
    }
    if (served.weights.digest == whole.digest) manifest_ = manifest_.Without(kModelComponent);
    const std::vector<WeightSpec> sent = std::exchange(manifest_.tensors, {});
    manifest_.total_bytes = 0;
    ranges_.clear();
    model_sums_ = {};
    size_t i = 0;        // of the source's tensors
    int64_t offset = 0;  // of tensor i in the source's stream
    for (size_t first = 0; first < sent.size();) {
      // A tensor may be there in several types, one behind the other.
      const std::string& name = sent[first].name;
      for (; whole.tensors[i].name != name; ++i) offset += whole.tensors[i].bytes();
      const auto wanted = types.find(name);
      const DType type = wanted == types.end() || ComponentOf(sent[first]) != kModelComponent
                             ? DType::kFloat32
                             : wanted->second;
      const std::optional<size_t> chosen = ChooseForm(i, type);
      if (!chosen.has_value()) {
        return absl::UnavailableError(absl::StrCat("the receiver wants \"", name, "\" as ",
                                                   TorchDTypeName(type),
                                                   ", which it did not when the weights were "
                                                   "prepared: publish again"));
      }
      for (; i < whole.tensors.size() && whole.tensors[i].name == name; ++i, ++first) {
        const int64_t begin = std::exchange(offset, offset + whole.tensors[i].bytes());
        if (i == *chosen) AddTensor(i, begin);
      }
    }
    if (!std::ranges::all_of(manifest_.tensors, &IsFloat32)) {
      manifest_.sent_digest = model_sums_.Digest();
    }
    return absl::OkStatus();
  }

  // Returns which form of the tensor whose first one is the source's tensor `first` is sent: one of
  // `type`, or else of float32, which every receiver takes.
  std::optional<size_t> ChooseForm(size_t first, DType type) const {
    const std::vector<WeightSpec>& tensors = source_.manifest().tensors;
    std::optional<size_t> chosen;
    for (size_t i = first; i < tensors.size() && tensors[i].name == tensors[first].name; ++i) {
      if (tensors[i].dtype == type) return i;
      if (IsFloat32(tensors[i])) chosen = i;
    }
    return chosen;
  }

  // Adds the source's tensor `i`, at `begin` in its stream, to what is sent.
  void AddTensor(size_t i, int64_t begin) {
    const WeightSpec& tensor = source_.manifest().tensors[i];
    manifest_.tensors.push_back(tensor);
    manifest_.total_bytes += tensor.bytes();
    if (!source_.sums().empty() && ComponentOf(tensor) == kModelComponent) {
      model_sums_.Add(tensor.name, source_.sums()[i]);
    }
    const int64_t end = begin + tensor.bytes();
    if (!ranges_.empty() && ranges_.back().end == begin) {
      ranges_.back().end = end;
    } else {
      ranges_.push_back({.begin = begin, .end = end});
    }
  }

  // Whether the receiver serves exactly what would be sent to it.
  bool Serves(const SentWeights& served) const {
    return served.weights == WeightsVersion{manifest_.version, manifest_.digest} &&
           std::ranges::all_of(manifest_.components, [&](const ComponentManifest& component) {
             return served.components.at(component.name) ==
                    WeightsVersion{manifest_.version, component.digest};
           });
  }

  // Returns where bytes [begin, end) of the stream that this receiver is sent are in the source's.
  std::vector<Range> Places(int64_t begin, int64_t end) const {
    std::vector<Range> places;
    for (const Range& range : ranges_) {
      const int64_t size = range.end - range.begin;
      if (begin < size && end > 0) {
        places.push_back({.begin = range.begin + std::max<int64_t>(begin, 0),
                          .end = range.begin + std::min(end, size)});
      }
      begin -= size;
      end -= size;
    }
    return places;
  }

  // Makes the chunk that has bytes [begin, end) of the stream.
  absl::Status FillChunk(int64_t begin, int64_t end, UploadWeightsRequest& chunk) const {
    const std::vector<Range> places = Places(begin, end);
    if (shares_.has_shared_file() || shares_gpu()) {
      chunk.clear_ranges();
      for (const Range& place : places) {
        auto& range = *chunk.add_ranges();
        range.set_offset(place.begin);
        range.set_size(place.end - place.begin);
      }
      return absl::OkStatus();
    }
    std::string& data = *chunk.mutable_data();
    data.resize(static_cast<size_t>(end - begin));
    auto out = absl::MakeSpan(reinterpret_cast<std::byte*>(data.data()), data.size());
    for (const Range& place : places) {
      const auto size = static_cast<size_t>(place.end - place.begin);
      TANDEM_RETURN_IF_ERROR(source_.Read(place.begin, out.first(size)));
      out.remove_prefix(size);
    }
    chunk.set_checksum(Xxh3_64(data.data(), data.size()));
    return absl::OkStatus();
  }

  // Whether the receiver reads the bytes in memory of GPUs.
  bool shares_gpu() const { return shares_.has_gpu_memory() || shares_.gpu_memories_size() > 0; }

  // Offers the source's file or memory, if it has one. A failure is the receiver's to find, which
  // then gets the bytes.
  void Offer(weights::v1::BeginUpdateRequest& request) const {
    GpuMemoriesToProto(source_.gpu_memories(), &request);
    if (source_.file() == nullptr) return;
    const absl::StatusOr<SharedFile> shared = Share(*source_.file());
    if (shared.ok()) SharedFileToProto(*shared, request.mutable_shared_file());
  }

  absl::StatusOr<int64_t> Begin() {
    weights::v1::BeginUpdateRequest request;
    request.set_update_id(update_id_);
    request.set_allow_rollback(options_.allow_rollback);
    WeightManifestToProto(manifest_, request.mutable_manifest());
    Offer(request);
    weights::v1::BeginUpdateResponse response;
    CallContext context(options_.call, options_.rpc_timeout);
    TANDEM_RETURN_IF_ERROR(
        FromGrpcStatus(receiver_.BeginUpdate(context.get(), request, &response)));
    if (response.next_chunk() < 0 || response.next_chunk() > manifest_.num_chunks()) {
      return absl::InternalError(
          absl::StrCat("the receiver asks for chunk ", response.next_chunk()));
    }
    begun_ = true;
    shares_.Clear();
    if (response.opens_gpu_memory()) {
      GpuMemoriesToProto(source_.gpu_memories(), &shares_);
    } else if (response.opens_shared_file()) {
      *shares_.mutable_shared_file() = request.shared_file();
    }
    return response.next_chunk();
  }

  absl::Status Upload(int64_t next_chunk) {
    const WeightManifest& manifest = manifest_;
    const int64_t num_chunks = manifest.num_chunks();
    if (next_chunk == num_chunks) return absl::OkStatus();
    weights::v1::UploadWeightsResponse response;
    CallContext context(options_.call, options_.rpc_timeout);
    const auto stream = receiver_.UploadWeights(context.get(), &response);
    UploadWeightsRequest chunk = shares_;
    chunk.set_update_id(update_id_);
    absl::Status read;
    for (int64_t index = next_chunk; index < num_chunks; ++index) {
      const int64_t begin = index * manifest.chunk_bytes;
      read = FillChunk(begin, std::min(begin + manifest.chunk_bytes, manifest.total_bytes), chunk);
      if (!read.ok()) {
        context.get()->TryCancel();
        break;
      }
      chunk.set_chunk_index(index);
      if (!stream->Write(chunk)) break;  // Finish says why
      chunk.clear_shared_file();
      chunk.clear_gpu_memory();
      chunk.clear_gpu_memories();
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
  WeightManifest manifest_;    // of what this receiver is sent
  std::vector<Range> ranges_;  // of that in the source's stream
  TensorSums model_sums_;      // of the model's tensors as they are sent
  // The source's file or memory, while the receiver reads the bytes there.
  UploadWeightsRequest shares_;
  // Bytes and transport of the last attempt that began an update.
  int64_t sent_bytes_ = 0;
  SentWeights::Transport transport_ = SentWeights::Transport::kStream;
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
    // The receiver was restarted with other types since it was asked for them: ask again.
    case absl::StatusCode::kInvalidArgument:
      return absl::EndsWith(FieldPath(status).value_or(""), ".dtype");
    case absl::StatusCode::kDataLoss:
      return !HasReason(status, reason::kDigestMismatch);
    default:
      return false;
  }
}

}  // namespace

absl::StatusOr<WantedWeights> AskWanted(WeightService::StubInterface& receiver,
                                        const WeightSenderOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const weights::v1::GetVersionResponse served,
                          AskVersion(receiver, options));
  return WantedWeights{
      .types = TypesFromProto(served),
      .reads_gpu_memory = !served.gpu_machine().empty() && served.gpu_machine() == MachineId()};
}

absl::StatusOr<SentWeights> SendWeights(WeightService::StubInterface& receiver,
                                        const std::string& update_id, const WeightSource& source,
                                        const WeightSenderOptions& options) {
  Sender sender(receiver, update_id, source, options);
  // Not CallWithRetry: here progress starts the count of attempts again, and DEADLINE_EXCEEDED,
  // NOT_FOUND and a damaged chunk can be repeated too.
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
