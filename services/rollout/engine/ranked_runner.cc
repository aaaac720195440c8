#include "services/rollout/engine/ranked_runner.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace tandem::rollout {
namespace {

// Errors that every rank finds before it computes.
bool IsOfTheRequest(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsOutOfRange(status);
}

absl::Status Replay(const SlotChange& change, TorchRunner& shard) {
  switch (change.kind) {
    case SlotChange::Kind::kAllocate: {
      TANDEM_ASSIGN_OR_RETURN(const int64_t slot, shard.AllocateSlot());
      if (slot == change.slot) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("slot ", slot, " is free here, and rank 0 took ", change.slot));
    }
    case SlotChange::Kind::kFree:
      shard.FreeSlot(change.slot);
      return absl::OkStatus();
    case SlotChange::Kind::kTruncate:
      return shard.Truncate(change.slot, change.length);
    case SlotChange::Kind::kCopyPrefix:
      return shard.CopyPrefix(change.from, change.slot, change.length);
  }
  return absl::InternalError("an unknown change of a slot");
}

}  // namespace

RankedRunner::RankedRunner(Author lane, ranks::ServerRanks* ranks, TorchRunner* shard)
    : ranks_(ranks), shard_(shard), next_{.lane = lane, .changes = {}, .inputs = {}} {}

absl::StatusOr<int64_t> RankedRunner::AllocateSlot() {
  TANDEM_ASSIGN_OR_RETURN(const int64_t slot, shard_->AllocateSlot());
  next_.changes.push_back({.kind = SlotChange::Kind::kAllocate, .slot = slot});
  return slot;
}

void RankedRunner::FreeSlot(int64_t slot) {
  shard_->FreeSlot(slot);
  next_.changes.push_back({.kind = SlotChange::Kind::kFree, .slot = slot});
}

absl::Status RankedRunner::Truncate(int64_t slot, int64_t length) {
  TANDEM_RETURN_IF_ERROR(shard_->Truncate(slot, length));
  next_.changes.push_back({.kind = SlotChange::Kind::kTruncate, .slot = slot, .length = length});
  return absl::OkStatus();
}

absl::Status RankedRunner::CopyPrefix(int64_t from, int64_t to, int64_t length) {
  TANDEM_RETURN_IF_ERROR(shard_->CopyPrefix(from, to, length));
  next_.changes.push_back(
      {.kind = SlotChange::Kind::kCopyPrefix, .slot = to, .from = from, .length = length});
  return absl::OkStatus();
}

absl::Status RankedRunner::Forward(std::span<const RunnerInput> inputs, const RowSink& sink) {
  next_.inputs.clear();
  for (const RunnerInput& input : inputs) {
    next_.inputs.push_back({.slot = input.slot,
                            .tokens = {input.tokens.begin(), input.tokens.end()},
                            .num_output_rows = input.num_output_rows});
  }
  ranks_->Announce(kPassCommand, /*request_id=*/"", next_);
  next_.changes.clear();
  absl::Status status = shard_->Forward(inputs, sink);
  if (!status.ok() && !IsOfTheRequest(status)) {
    ranks_->Fail(absl::StrCat("a pass failed: ", status.message()));
  }
  return status;
}

absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard) {
  for (const SlotChange& change : pass.changes) TANDEM_RETURN_IF_ERROR(Replay(change, shard));
  std::vector<RunnerInput> inputs;
  inputs.reserve(pass.inputs.size());
  for (const RankedPass::Input& input : pass.inputs) {
    inputs.push_back(
        {.slot = input.slot, .tokens = input.tokens, .num_output_rows = input.num_output_rows});
  }
  const absl::Status status = shard.Forward(inputs, nullptr);
  return IsOfTheRequest(status) ? absl::OkStatus() : status;
}

}  // namespace tandem::rollout
