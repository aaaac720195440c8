#include "services/rollout/engine/ranks/ranked_runner.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::rollout {
namespace {

// Errors that every rank finds before it computes.
bool IsOfTheRequest(const absl::Status& status) { return absl::IsInvalidArgument(status); }

}  // namespace

RankedRunner::RankedRunner(Author lane, ranks::ServerRanks* ranks, TorchRunner* shard)
    : ranks_(ranks), shard_(shard), lane_(lane) {}

absl::Status RankedRunner::Run(const Pass& pass, PassResults& results) {
  RankedPass announced = {.lane = lane_,
                          .copies = {pass.copies.begin(), pass.copies.end()},
                          .sequences = {},
                          .new_images = {},
                          .dropped_images = {}};
  const auto copy = [](const auto& span) { return std::vector(span.begin(), span.end()); };
  for (const DecodeInput& sequence : pass.sequences) {
    announced.sequences.push_back({.blocks = copy(sequence.blocks),
                                   .start = sequence.start,
                                   .tokens = copy(sequence.tokens),
                                   .output_rows = copy(sequence.output_rows),
                                   .records_routing = sequence.records_routing,
                                   .images = sequence.images == nullptr ? 0 : sequence.images->id});
  }
  AnnounceImages(pass, announced);
  ranks_->Announce(kPassCommand, /*request_id=*/"", announced);
  absl::Status status = shard_->Run(pass, results);
  if (!status.ok() && !IsOfTheRequest(status)) {
    ranks_->Fail(absl::StrCat("a pass failed: ", status.message()));
  }
  return status;
}

void RankedRunner::AnnounceImages(const Pass& pass, RankedPass& announced) {
  std::set<uint64_t> read;
  for (const DecodeInput& sequence : pass.sequences) {
    if (sequence.images == nullptr || !read.insert(sequence.images->id).second) continue;
    const PromptImages& images = *sequence.images;
    const auto held = std::ranges::find(held_, images.id, &HeldImages::id);
    if (held != held_.end()) {
      held_.splice(held_.end(), held_, held);
      continue;
    }
    announced.new_images.push_back(images);
    held_.push_back({.id = images.id});
    for (const VisionInput& input : images.inputs) {
      held_.back().bytes += static_cast<int64_t>(input.pixels->size());
    }
    held_bytes_ += held_.back().bytes;
  }
  while (held_bytes_ > kMaxHeldBytes && !read.contains(held_.front().id)) {
    announced.dropped_images.push_back(held_.front().id);
    held_bytes_ -= held_.front().bytes;
    held_.pop_front();
  }
}

absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard,
                        std::map<uint64_t, PromptImages>& images) {
  for (const uint64_t id : pass.dropped_images) images.erase(id);
  for (const PromptImages& one : pass.new_images) images[one.id] = one;
  std::vector<DecodeInput> sequences;
  for (const RankedPass::Sequence& sequence : pass.sequences) {
    sequences.push_back({.blocks = sequence.blocks,
                         .start = sequence.start,
                         .tokens = sequence.tokens,
                         .output_rows = sequence.output_rows,
                         .records_routing = sequence.records_routing,
                         .images = sequence.images == 0 ? nullptr : &images.at(sequence.images)});
  }
  const absl::Status status = shard.Follow(pass.copies, sequences);
  return IsOfTheRequest(status) ? absl::OkStatus() : status;
}

}  // namespace tandem::rollout
