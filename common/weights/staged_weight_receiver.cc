#include "common/weights/staged_weight_receiver.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/weights/finite_values.h"

namespace tandem {
namespace {

absl::Status Stale(absl::string_view message) {
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "manifest.version", message),
                    reason::kStaleWeightVersion);
}

// Checks that the tensors come component by component, in the order of the table.
absl::Status CheckOrder(const std::vector<WeightSpec>& tensors) {
  const auto sorted_until = std::ranges::is_sorted_until(tensors, {}, ComponentIndex);
  if (sorted_until == tensors.end()) return absl::OkStatus();
  const WeightSpec &wrong = *sorted_until, &before = *std::prev(sorted_until);
  return InvalidField(
      absl::StrCat("manifest.tensors[", sorted_until - tensors.begin(), "].name"),
      absl::StrCat("\"", wrong.name, "\" comes after \"", before.name, "\": the tensors of the ",
                   ComponentOf(before), " come after those of the ", ComponentOf(wrong)));
}

// Checks that there is a digest of the tensors as they travel, beside the one of their float32
// values, where the two differ.
absl::Status CheckSentDigest(const WeightManifest& manifest) {
  const std::string& digest = manifest.sent_digest;
  if (std::ranges::all_of(manifest.tensors, &IsFloat32)) {
    if (digest.empty() || digest == manifest.digest) return absl::OkStatus();
    return InvalidField("manifest.sent_digest",
                        "differs from the digest, but all tensors travel as float32");
  }
  if (digest.size() == 32) return absl::OkStatus();
  return InvalidField("manifest.sent_digest",
                      "must be 32 hexadecimal digits where a tensor does not travel as float32");
}

// Returns DATA_LOSS where the two digests of `what` differ.
absl::Status CheckDigest(absl::string_view what, const std::string& computed,
                         const std::string& expected) {
  if (computed == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(what, " received have digest ", computed,
                                          ", the manifest says ", expected,
                                          "; the old weights are kept"));
}

// Whether a tensor may be served of which value `not_finite`, if any, is infinite or NaN.
absl::Status CheckServable(absl::string_view name, std::optional<int64_t> not_finite) {
  if (!not_finite.has_value()) return absl::OkStatus();
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "manifest.tensors",
                               absl::StrCat("\"", name, "\" is not finite at value ", *not_finite,
                                            "; the old weights are kept (the rollout server's "
                                            "allow_not_finite_weights serves such weights)")),
                    reason::kWeightsNotFinite);
}

constexpr size_t kReplacedKept = 16;

}  // namespace

StagedWeightReceiver::Update::Update(std::string id, const WeightManifest& manifest,
                                     std::unique_ptr<NextWeights> weights, bool allow_not_finite,
                                     const TensorSums& kept)
    : id(std::move(id)),
      manifest(manifest),
      // Tensors that travel in another type have a digest of their own.
      sums{manifest.sent_digest.empty() ? kept : TensorSums()},
      weights(std::move(weights)),
      stager(
          manifest.tensors,
          [this, allow_not_finite](const WeightSpec& spec, TensorBytes bytes) -> absl::Status {
            sums[ComponentIndex(spec)].AddTensor(spec.name, bytes.get(), spec.bytes());
            if (!allow_not_finite) {
              TANDEM_RETURN_IF_ERROR(CheckServable(
                  spec.name,
                  FirstNotFinite(spec.dtype, {bytes.get(), static_cast<size_t>(spec.bytes())})));
            }
            return this->weights->Add(spec, std::move(bytes));
          },
          [this](const WeightSpec& spec, absl::Span<const SharedRange> ranges) {
            return this->weights->AddShared(spec, ranges);
          }) {}

StagedWeightReceiver::StagedWeightReceiver(std::vector<WeightSpec> parameters,
                                           std::optional<WeightSpec> optional,
                                           int64_t num_token_ids, WeightsVersion initial,
                                           Start start, std::vector<ReceivedComponent> components,
                                           bool allow_not_finite, ReceivedAdapter adapter,
                                           OpenGpu open_gpu)
    : parameters_(std::move(parameters)),
      optional_(std::move(optional)),
      num_token_ids_(num_token_ids),
      start_(std::move(start)),
      components_(std::move(components)),
      allow_not_finite_(allow_not_finite),
      adapter_(std::move(adapter)),
      open_gpu_(std::move(open_gpu)),
      version_(std::move(initial)) {
  for (const ReceivedComponent& component : components_) {
    component_versions_[component.name] = component.initial;
  }
}

absl::StatusOr<const ReceivedComponent*> StagedWeightReceiver::FindComponent(
    const std::string& path, const ComponentManifest& manifest) const {
  TANDEM_RETURN_IF_ERROR(CheckComponentName(path + ".name", manifest.name));
  const auto found = std::ranges::find(components_, manifest.name, &ReceivedComponent::name);
  if (found == components_.end()) {
    return InvalidField(path + ".name", absl::StrCat("this server has no ", manifest.name));
  }
  if (manifest.config != found->config) {
    return InvalidField(path + ".config",
                        absl::StrCat("the ", manifest.name, " is ", manifest.config,
                                     ", this server's is ", found->config));
  }
  if (manifest.digest.size() != 32) {
    return InvalidField(path + ".digest", "must be 32 hexadecimal digits");
  }
  return &*found;
}

absl::Status StagedWeightReceiver::CheckManifest(const WeightManifest& manifest) const {
  if (manifest.adapter != adapter_.settings) {
    const auto name = [](const std::string& settings) {
      return settings.empty() ? "no adapters" : absl::StrCat("adapters of ", settings);
    };
    return InvalidField("manifest.adapter",
                        absl::StrCat("the sender has ", name(manifest.adapter),
                                     ", this server has ", name(adapter_.settings), " (lora)"));
  }
  std::map<std::string, const WeightSpec*> missing;
  if (manifest.has_model()) {
    for (const WeightSpec& parameter : parameters_) missing[parameter.name] = &parameter;
  }
  for (size_t i = 0; i < manifest.components.size(); ++i) {
    TANDEM_ASSIGN_OR_RETURN(
        const ReceivedComponent* component,
        FindComponent(absl::StrCat("manifest.components[", i, "]"), manifest.components[i]));
    for (const WeightSpec& parameter : component->parameters) missing[parameter.name] = &parameter;
  }
  TANDEM_RETURN_IF_ERROR(CheckOrder(manifest.tensors));
  std::set<std::string> seen;
  int64_t total_bytes = 0;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const WeightSpec& spec = manifest.tensors[i];
    const std::string path = absl::StrCat("manifest.tensors[", i, "]");
    if (!seen.insert(spec.name).second) {
      return InvalidField(path + ".name", absl::StrCat("\"", spec.name, "\" is listed twice"));
    }
    const auto found = missing.find(spec.name);
    const WeightSpec* expected = found != missing.end() ? found->second : nullptr;
    if (expected == nullptr && optional_.has_value() && optional_->name == spec.name) {
      expected = &*optional_;
    }
    if (expected == nullptr) {
      return InvalidField(path + ".name",
                          absl::StrCat("the model has no tensor \"", spec.name, "\""));
    }
    if (spec.shape != expected->shape) {
      return InvalidField(
          path + ".shape",
          absl::StrCat("\"", spec.name, "\" is [", absl::StrJoin(spec.shape, ", "),
                       "], the model's is [", absl::StrJoin(expected->shape, ", "), "]"));
    }
    if (!IsFloat32(spec) && spec.dtype != expected->dtype) {
      return InvalidField(
          path + ".dtype",
          absl::StrCat("\"", spec.name, "\" travels as ", TorchDTypeName(spec.dtype),
                       ", but this server wants ", TorchDTypeName(expected->dtype)));
    }
    if (found != missing.end()) missing.erase(found);
    total_bytes += spec.bytes();
  }
  if (!missing.empty()) {
    return InvalidField("manifest.tensors",
                        absl::StrCat("\"", missing.begin()->first, "\" is missing"));
  }
  if (total_bytes != manifest.total_bytes) {
    return InvalidField("manifest.total_bytes", absl::StrCat("the tensors have ", total_bytes,
                                                             " bytes, not ", manifest.total_bytes));
  }
  if (manifest.chunk_bytes < 1) return InvalidField("manifest.chunk_bytes", "must be at least 1");
  if (manifest.digest.size() != 32) {
    return InvalidField("manifest.digest", "must be 32 hexadecimal digits");
  }
  TANDEM_RETURN_IF_ERROR(CheckSentDigest(manifest));
  if (manifest.num_token_ids != num_token_ids_) {
    return WithReason(
        FieldError(absl::StatusCode::kFailedPrecondition, "manifest.num_token_ids",
                   absl::StrCat("the sender's model has ", manifest.num_token_ids,
                                " token ids, but this one has ", num_token_ids_,
                                ": one of them was loaded without its tokenizer.json, or with "
                                "another one")),
        reason::kVocabularyMismatch);
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> StagedWeightReceiver::Begin(const std::string& update_id,
                                                    const WeightManifest& manifest,
                                                    bool allow_rollback) {
  if (update_id.empty()) return InvalidField("update_id", "must not be empty");
  TANDEM_RETURN_IF_ERROR(CheckManifest(manifest));
  // Dropped without the lock, as in Abort, and before the sender brings the first tensor.
  std::shared_ptr<Update> former;
  std::unique_lock lock(mutex_);
  if (!manifest.has_model() && manifest.digest != version_.digest) {
    return InvalidField(
        "manifest.tensors",
        absl::StrCat("has no tensor of the model, whose digest is ", manifest.digest,
                     "; the one being served is ", version_.digest));
  }
  // The sender missed the answer to its commit, or another sender sent the same weights.
  const bool same = ServesModelLocked(manifest);
  if (same && ServesComponentsLocked(manifest)) {
    last_committed_id_ = update_id;
    return manifest.num_chunks();
  }
  const bool back = manifest.version <= version_.version && !same;
  if (back && !allow_rollback) {
    return Stale(absl::StrCat("version ", manifest.version, " is not above the one being served, ",
                              version_.version));
  }
  if (update_id == overtaken_id_ && !allow_rollback) {
    return Stale(absl::StrCat("update \"", update_id, "\" was replaced when the server went back"));
  }
  if (open_ != nullptr) {
    if (open_->id == update_id && open_->manifest == manifest) {
      const std::shared_ptr<Update> update = open_;
      update->last_call = SteadyTime::Now();
      lock.unlock();
      // A chunk of the interrupted stream may still be on its way in.
      const std::lock_guard stream_lock(update->stream_mutex);
      return update->next_chunk();
    }
    const bool newer = open_->manifest.version > manifest.version;
    if (open_->committing || (newer && !allow_rollback)) {
      return Stale(absl::StrCat("update \"", open_->id, "\" to version ", open_->manifest.version,
                                " is in progress"));
    }
    if (back) overtaken_id_ = open_->id;
    if (open_->id != update_id) {
      replaced_.emplace_back(open_->id,
                             absl::StrCat("\"", update_id, "\" to version ", manifest.version));
      if (replaced_.size() > kReplacedKept) replaced_.pop_front();
    }
  }
  std::erase_if(replaced_, [&](const auto& pair) { return pair.first == update_id; });
  former = std::move(open_);
  open_ = std::make_shared<Update>(update_id, manifest, start_(), allow_not_finite_, adapter_.kept);
  return 0;
}

absl::StatusOr<std::shared_ptr<StagedWeightReceiver::Update>> StagedWeightReceiver::FindOpenLocked(
    const std::string& update_id) {
  if (open_ == nullptr || open_->id != update_id) return NotOpenLocked(update_id);
  if (open_->committing) {
    return absl::FailedPreconditionError(
        absl::StrCat("update \"", update_id, "\" is being committed"));
  }
  open_->last_call = SteadyTime::Now();
  return open_;
}

absl::Status StagedWeightReceiver::NotOpenLocked(const std::string& update_id) const {
  for (const auto& [id, by] : replaced_) {
    if (id != update_id) continue;
    return WithReason(
        absl::AbortedError(absl::StrCat("update \"", update_id, "\" was replaced by update ", by,
                                        ": another sender publishes to this server")),
        reason::kUpdateReplaced);
  }
  return absl::NotFoundError(absl::StrCat("no open weight update with id \"", update_id, "\""));
}

absl::StatusOr<int64_t> StagedWeightReceiver::Append(const std::string& update_id,
                                                     int64_t chunk_index,
                                                     absl::Span<const std::byte> data) {
  return AppendChunk(update_id, chunk_index, static_cast<int64_t>(data.size()),
                     [&](TensorStager& stager) { stager.Write(data); });
}

absl::StatusOr<int64_t> StagedWeightReceiver::AppendShared(
    const std::string& update_id, int64_t chunk_index,
    const std::shared_ptr<const SharedBytes>& bytes, absl::Span<const FileRange> ranges) {
  int64_t size = 0;
  for (const FileRange& range : ranges) size += range.size;
  return AppendChunk(update_id, chunk_index, size, [&](TensorStager& stager) {
    for (const FileRange& range : ranges) {
      stager.WriteFrom({.from = bytes, .offset = range.offset, .size = range.size});
    }
  });
}

absl::StatusOr<int64_t> StagedWeightReceiver::AppendChunk(
    const std::string& update_id, int64_t chunk_index, int64_t size,
    absl::FunctionRef<void(TensorStager& stager)> write) {
  std::shared_ptr<Update> update;
  {
    const std::lock_guard lock(mutex_);
    TANDEM_ASSIGN_OR_RETURN(update, FindOpenLocked(update_id));
  }
  const std::lock_guard stream_lock(update->stream_mutex);
  const int64_t next = update->next_chunk();
  if (chunk_index != next) {
    return WithReason(
        InvalidField("chunk_index", absl::StrCat("expected chunk ", next, ", got ", chunk_index)),
        reason::kChunkOutOfOrder);
  }
  const int64_t expected =
      std::min(update->manifest.chunk_bytes, update->manifest.total_bytes - update->received);
  if (size != expected || expected == 0) {
    return InvalidField(
        "data", absl::StrCat("chunk ", next, " must hold ", expected, " bytes, holds ", size));
  }
  write(update->stager);
  update->received += expected;
  return update->next_chunk();
}

absl::Status StagedWeightReceiver::CheckReceived(Update& update) {
  const std::lock_guard stream_lock(update.stream_mutex);
  if (update.received == update.manifest.total_bytes) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("update \"", update.id, "\" has ",
                                                    update.received, " of ",
                                                    update.manifest.total_bytes, " bytes"));
}

absl::Status StagedWeightReceiver::CheckRead(Update& update) const {
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ReadTensor> read, update.weights->TakeRead());
  absl::Status servable;
  for (const ReadTensor& tensor : read) {
    update.sums[ComponentIndex({.name = tensor.name, .shape = {}})].Add(tensor.name, tensor.sums);
    if (!allow_not_finite_) servable.Update(CheckServable(tensor.name, tensor.not_finite));
  }
  // Memory that was overwritten meanwhile is often not finite either: it is sent again.
  TANDEM_RETURN_IF_ERROR(CheckDigests(update));
  return servable;
}

absl::Status StagedWeightReceiver::CheckDigests(const Update& update) {
  // Without the model's tensors the digest is that of the served ones: only a commit changes them,
  // and it ends every other update.
  if (update.manifest.has_model()) {
    const WeightManifest& manifest = update.manifest;
    TANDEM_RETURN_IF_ERROR(
        CheckDigest("the weights", update.sums[0].Digest(),
                    manifest.sent_digest.empty() ? manifest.digest : manifest.sent_digest));
  }
  for (size_t i = 1; i < kWeightComponents.size(); ++i) {
    const ComponentManifest* const component = update.manifest.Find(kWeightComponents[i]);
    if (component == nullptr) continue;
    TANDEM_RETURN_IF_ERROR(CheckDigest(absl::StrCat("the ", component->name, "'s weights"),
                                       update.sums[i].Digest(), component->digest));
  }
  return absl::OkStatus();
}

absl::StatusOr<WeightsVersion> StagedWeightReceiver::Commit(const std::string& update_id,
                                                            const CallScope& call) {
  TANDEM_RETURN_IF_ERROR(call.Check());
  std::shared_ptr<Update> update;
  {
    std::unique_lock lock(mutex_);
    // A sender that lost its connection commits again while its first request still waits. Only
    // the last repeat has a caller: the others leave their threads.
    const auto is_open = [&] { return open_ != nullptr && open_->id == update_id; };
    const int64_t turn = is_open() ? ++open_->commits : 0;
    commit_changed_.notify_all();
    const auto go = [&] { return !is_open() || !open_->committing || open_->commits != turn; };
    if (!commit_changed_.wait(lock, call.cancellation, go)) {
      return absl::CancelledError("the caller cancelled the call");
    }
    if (is_open() && open_->committing) {
      return absl::UnavailableError(absl::StrCat(
          "update \"", update_id, "\" is being committed; call again to wait for its end"));
    }
    if (!is_open() && !last_committed_id_.empty() && update_id == last_committed_id_) {
      return version_;
    }
    TANDEM_ASSIGN_OR_RETURN(update, FindOpenLocked(update_id));
    update->committing = true;  // no other call may touch the update until the swap is over
  }
  absl::Status applied = CheckReceived(*update);
  const bool incomplete = !applied.ok();
  if (applied.ok()) applied = update->stager.Finish(call);
  if (applied.ok()) applied = CheckRead(*update);
  if (applied.ok()) applied = update->weights->Apply(update->manifest, call);
  const std::lock_guard lock(mutex_);
  update->committing = false;
  update->last_call = SteadyTime::Now();
  commit_changed_.notify_all();
  if (incomplete || absl::IsDeadlineExceeded(applied) || absl::IsCancelled(applied)) {
    return applied;  // the swap did not begin: the sender may go on, or commit again
  }
  open_.reset();  // its memory goes with `update`, when the receiver is not locked any more
  if (!applied.ok()) return applied;
  const WeightManifest& manifest = update->manifest;
  if (manifest.version > version_.version) overtaken_id_.clear();
  version_ = {.version = manifest.version, .digest = manifest.digest};
  for (const ComponentManifest& component : manifest.components) {
    component_versions_[component.name] = {manifest.version, component.digest};
  }
  last_committed_id_ = update->id;
  return version_;
}

absl::Status StagedWeightReceiver::Abort(const std::string& update_id) {
  // Dropped without the lock: its end waits for the tensor that is being taken.
  std::shared_ptr<Update> update;
  const std::lock_guard lock(mutex_);
  TANDEM_ASSIGN_OR_RETURN(update, FindOpenLocked(update_id));
  open_.reset();
  return absl::OkStatus();
}

void StagedWeightReceiver::DropAbandoned(SteadyTime now) {
  std::shared_ptr<Update> update;  // dropped without the lock, as in Abort
  const std::lock_guard lock(mutex_);
  if (open_ == nullptr || open_->committing || now - open_->last_call < kAbandonedAfter) return;
  Log(LogLevel::kWarning, "weight_update_dropped",
      {{"update_id", open_->id}, {"reason", "its sender no longer calls"}});
  update = std::move(open_);
}

WeightsVersion StagedWeightReceiver::Version() const {
  std::lock_guard lock(mutex_);
  return version_;
}

TensorTypes StagedWeightReceiver::WantedTypes() const {
  TensorTypes types;
  for (const WeightSpec& parameter : parameters_) {
    if (!IsFloat32(parameter)) types[parameter.name] = parameter.dtype;
  }
  if (optional_.has_value() && !IsFloat32(*optional_)) types[optional_->name] = optional_->dtype;
  return types;
}

std::optional<WeightsVersion> StagedWeightReceiver::ComponentVersion(absl::string_view name) const {
  std::lock_guard lock(mutex_);
  const auto found = component_versions_.find(name);
  if (found == component_versions_.end()) return std::nullopt;
  return found->second;
}

bool StagedWeightReceiver::ServesModelLocked(const WeightManifest& manifest) const {
  return version_ == WeightsVersion{manifest.version, manifest.digest};
}

bool StagedWeightReceiver::ServesComponentsLocked(const WeightManifest& manifest) const {
  return std::ranges::all_of(manifest.components, [&](const ComponentManifest& component) {
    return component_versions_.at(component.name) ==
           WeightsVersion{manifest.version, component.digest};
  });
}

std::string StagedWeightReceiver::OpenUpdateId() const {
  std::lock_guard lock(mutex_);
  return open_ == nullptr ? "" : open_->id;
}

}  // namespace tandem
