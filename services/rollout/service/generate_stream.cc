#include "services/rollout/service/generate_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/logging.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/error_table.h"
#include "services/rollout/service/convert.h"

namespace tandem::rollout {
namespace {

constexpr size_t kMaxRequestIdBytes = 256;
constexpr int64_t kDrainingRetryMilliseconds = 1000;

absl::Status DrainingError() {
  return WithRetryAfter(
      WithReason(absl::UnavailableError("the server is draining"), reason::kDraining),
      kDrainingRetryMilliseconds);
}

// Names the sample of an event with tokens.
std::string SampleKey(const std::string& request_id, uint64_t sample_index) {
  return absl::StrCat(sample_index, " ", request_id);
}

// Appends new tokens to an event of the same sample that still waits, so that a slow reader gets
// one event per sample rather than one per token.
bool MergeTokens(v1::GenerateResponse& waiting, const v1::GenerateResponse& message) {
  const v1::TokensEvent& fresh = message.tokens();
  v1::TokensEvent& held = *waiting.mutable_tokens();
  if (held.offset() + held.token_ids_size() != fresh.offset()) return false;
  held.mutable_token_ids()->MergeFrom(fresh.token_ids());
  held.mutable_authorship_mask()->append(fresh.authorship_mask());
  return true;
}

}  // namespace

// A listener that passes one prompt's events to the stream, on the engine thread.
class GenerateStream::Listener final : public PromptListener {
 public:
  Listener(std::shared_ptr<GenerateStream> stream, std::string request_id)
      : stream_(std::move(stream)), request_id_(std::move(request_id)) {}
  void OnTokens(TokensDelta delta) override { stream_->OnTokens(request_id_, delta); }
  void OnFinished(Trajectory trajectory, SampleDrafts drafts) override {
    stream_->OnFinished(request_id_, trajectory, drafts);
  }
  void OnFailed(absl::Status status) override { stream_->OnFailed(request_id_, status); }

 private:
  const std::shared_ptr<GenerateStream> stream_;
  const std::string request_id_;
};

absl::Status GenerateStream::OnMessage(const v1::GenerateRequest& request) {
  switch (request.action_case()) {
    case v1::GenerateRequest::kSubmit:
      return Submit(request.submit());
    case v1::GenerateRequest::kCancel:
      Cancel(request.cancel());
      return absl::OkStatus();
    case v1::GenerateRequest::ACTION_NOT_SET:
      break;
  }
  return InvalidField("action", "is required");
}

absl::Status GenerateStream::Submit(const v1::SubmitPrompts& submit) {
  if (batch_ == nullptr) batch_ = std::make_unique<Batch>(*budget_);
  batch_->num_prompts += submit.prompts_size();
  if (batch_->num_prompts > options_.max_batch_samples) {
    return FieldError(absl::StatusCode::kResourceExhausted, "submit.prompts",
                      absl::StrCat("a batch may have at most ", options_.max_batch_samples,
                                   " prompts (max_queue)"));
  }
  if (submit.more_follow() && batch_->refused.ok()) {
    absl::Status taken = batch_->bytes.Take(static_cast<int64_t>(submit.ByteSizeLong()));
    if (!taken.ok()) RefuseBatch(taken);
  }
  for (const v1::Prompt& prompt : submit.prompts()) Collect(prompt);
  if (!submit.more_follow()) AdmitBatch();
  return absl::OkStatus();
}

void GenerateStream::Collect(const v1::Prompt& prompt) {
  const std::string& id = prompt.request_id();
  if (id.empty() || id.size() > kMaxRequestIdBytes) {
    Fail(id.substr(0, kMaxRequestIdBytes),
         InvalidField("request_id", absl::StrCat("must have 1 to ", kMaxRequestIdBytes,
                                                 " bytes, has ", id.size())));
    return;
  }
  absl::StatusOr<PromptRequest> request = PromptFromProto(prompt, options_.tandem);
  absl::Status status = request.status();
  if (status.ok()) status = blobs_->Collect(request->vision_inputs, request->blobs);
  if (status.ok()) status = engine_->Validate(*request);
  if (!status.ok()) {
    Fail(id, status);
    return;
  }
  if (batch_->samples + request->num_samples > options_.max_batch_samples) {
    RefuseBatch(absl::ResourceExhaustedError(absl::StrCat(
        "the batch asks for more samples than max_queue, ", options_.max_batch_samples)));
  }
  if (!batch_->refused.ok()) {
    Fail(id, batch_->refused);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (pending_.emplace(id, Pending{std::nullopt, request->num_samples}).second) {
      unfinished_sequences_ += request->num_samples;
    } else {
      status = FieldError(absl::StatusCode::kAlreadyExists, "request_id",
                          absl::StrCat("\"", id, "\" is in use in this stream"));
    }
  }
  if (!status.ok()) {
    Fail(id, status);
    return;
  }
  request->deadline = options_.deadline;
  batch_->samples += request->num_samples;
  batch_->prompts.emplace_back(id, *std::move(request));
}

void GenerateStream::RefuseBatch(const absl::Status& status) {
  batch_->refused = status;
  const auto prompts = std::exchange(batch_->prompts, {});
  for (const auto& [id, request] : prompts) OnFailed(id, status);
}

void GenerateStream::AdmitBatch() {
  bool draining = false;
  {
    std::lock_guard lock(mutex_);
    draining = draining_;
  }
  if (draining) RefuseBatch(DrainingError());
  const std::unique_ptr<Batch> batch = std::move(batch_);
  if (batch->prompts.empty()) return;

  std::vector<Submission> submissions;
  for (auto& [id, request] : batch->prompts) {
    submissions.push_back({.request = std::move(request),
                           .listener = std::make_shared<Listener>(shared_from_this(), id),
                           .stream = options_.stream});
  }
  const absl::StatusOr<std::vector<PromptId>> admitted = engine_->Submit(std::move(submissions));
  if (!admitted.ok()) {
    for (const auto& [id, request] : batch->prompts) OnFailed(id, admitted.status());
    return;
  }
  bool gone = false;
  {
    std::lock_guard lock(mutex_);
    gone = client_gone_;
    for (size_t i = 0; i < batch->prompts.size(); ++i) {
      // A prompt may be done already.
      const auto found = pending_.find(batch->prompts[i].first);
      if (found != pending_.end()) found->second.id = (*admitted)[i];
    }
  }
  if (gone) engine_->Cancel(*admitted);
}

void GenerateStream::Cancel(const v1::CancelPrompts& cancel) {
  std::vector<PromptId> admitted;
  std::vector<std::string> collected;
  {
    std::lock_guard lock(mutex_);
    for (const std::string& id : cancel.request_ids()) {
      const auto found = pending_.find(id);
      if (found == pending_.end()) continue;
      if (found->second.id.has_value()) {
        admitted.push_back(*found->second.id);
      } else {
        collected.push_back(id);
      }
    }
  }
  if (!admitted.empty()) engine_->Cancel(admitted);
  for (const std::string& id : collected) {
    std::erase_if(batch_->prompts, [&](const auto& prompt) {
      if (prompt.first != id) return false;
      batch_->samples -= prompt.second.num_samples;
      return true;
    });
    OnFailed(id, absl::CancelledError("the caller cancelled"));
  }
}

void GenerateStream::OnHalfClose() {
  if (batch_ != nullptr) {
    RefuseBatch(InvalidField("submit.more_follow", "the stream ended before the batch did"));
    batch_.reset();
  }
  std::lock_guard lock(mutex_);
  half_closed_ = true;
  EndIfDone();
}

void GenerateStream::OnClientGone() {
  std::vector<PromptId> prompts;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(client_gone_, true)) return;
    for (const auto& [id, pending] : pending_) {
      if (pending.id.has_value()) prompts.push_back(*pending.id);
    }
    if (outbox_ != nullptr) {
      outbox_->FinishNow(rpc::ToGrpcStatus(
          absl::CancelledError("the client has gone or its deadline has passed")));
    }
  }
  if (prompts.empty()) return;
  Log(LogLevel::kInfo, "generate_cancelled", {{"prompts", prompts.size()}});
  engine_->Cancel(prompts);
}

void GenerateStream::Detach() {
  OnClientGone();
  batch_.reset();
  std::lock_guard lock(mutex_);
  outbox_ = nullptr;
}

void GenerateStream::Drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
  EndIfDone();
}

void GenerateStream::Tick(SteadyTime now, absl::Duration interval) {
  std::unique_lock lock(mutex_);
  if (outbox_ == nullptr) return;
  if (outbox_->ended() && !pending_.empty()) {  // because its client does not read
    lock.unlock();
    OnClientGone();
    return;
  }
  if (now - last_event_ < interval || outbox_->size() > 0) return;
  v1::GenerateResponse event;
  event.mutable_heartbeat()->set_unfinished_sequences(static_cast<int32_t>(unfinished_sequences_));
  Push(std::move(event));
}

bool GenerateStream::WantsMore() const {
  std::lock_guard lock(mutex_);
  return outbox_ != nullptr && outbox_->size() < kMaxWaitingEvents;
}

int64_t GenerateStream::unfinished_sequences() const {
  std::lock_guard lock(mutex_);
  return unfinished_sequences_;
}

void GenerateStream::Fail(const std::string& request_id, const absl::Status& status) {
  std::lock_guard lock(mutex_);
  Push(FailedToProto(request_id, status));
}

void GenerateStream::OnTokens(const std::string& request_id, const TokensDelta& delta) {
  std::lock_guard lock(mutex_);
  if (outbox_ == nullptr) return;
  last_event_ = SteadyTime::Now();
  outbox_->Push(TokensToProto(request_id, delta), SampleKey(request_id, delta.sample_index),
                MergeTokens);
}

void GenerateStream::OnFinished(const std::string& request_id, const Trajectory& trajectory,
                                const SampleDrafts& drafts) {
  std::lock_guard lock(mutex_);
  const auto found = pending_.find(request_id);
  if (found == pending_.end()) return;
  --unfinished_sequences_;
  if (--found->second.samples_left == 0) pending_.erase(found);
  Push(FinishedToProto(request_id, trajectory, drafts));
  EndIfDone();
}

void GenerateStream::OnFailed(const std::string& request_id, const absl::Status& status) {
  std::lock_guard lock(mutex_);
  const auto found = pending_.find(request_id);
  if (found == pending_.end()) return;
  unfinished_sequences_ -= found->second.samples_left;
  pending_.erase(found);
  Push(FailedToProto(request_id, status));
  EndIfDone();
}

void GenerateStream::Push(v1::GenerateResponse event) {
  if (outbox_ == nullptr) return;
  last_event_ = SteadyTime::Now();
  outbox_->Push(std::move(event));
}

void GenerateStream::EndIfDone() {
  if (outbox_ == nullptr || !pending_.empty()) return;
  if (half_closed_) {
    outbox_->Finish(grpc::Status::OK);
  } else if (draining_) {
    outbox_->Finish(rpc::ToGrpcStatus(DrainingError()));
  }
}

}  // namespace tandem::rollout
