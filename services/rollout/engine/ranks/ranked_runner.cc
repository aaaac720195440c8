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
  for (const PassSequence& sequence : pass.sequences) {
    RankedPass::Sequence copy = {.blocks = {sequence.blocks.begin(), sequence.blocks.end()},
                                 .start = sequence.start,
                                 .tokens = {sequence.tokens.begin(), sequence.tokens.end()},
                                 .output_rows = {},
                                 .records_routing = sequence.records_routing,
                                 .images = sequence.images == nullptr ? 0 : sequence.images->id};
    for (const OutputRow& row : sequence.rows) copy.output_rows.push_back(row.index);
    announced.sequences.push_back(std::move(copy));
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
  for (const PassSequence& sequence : pass.sequences) {
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
  std::vector<std::vector<OutputRow>> rows;
  for (const RankedPass::Sequence& sequence : pass.sequences) {
    rows.emplace_back();
    for (const int64_t index : sequence.output_rows) rows.back().push_back({.index = index});
  }
  std::vector<PassSequence> sequences;
  for (size_t i = 0; i < pass.sequences.size(); ++i) {
    const RankedPass::Sequence& sequence = pass.sequences[i];
    sequences.push_back({.blocks = sequence.blocks,
                         .start = sequence.start,
                         .tokens = sequence.tokens,
                         .rows = rows[i],
                         .records_routing = sequence.records_routing,
                         .images = sequence.images == 0 ? nullptr : &images.at(sequence.images)});
  }
  const absl::Status status = shard.Follow({.copies = pass.copies, .sequences = sequences});
  return IsOfTheRequest(status) ? absl::OkStatus() : status;
}

}  // namespace tandem::rollout
