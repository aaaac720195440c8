#include "services/rollout/engine/ranked_runner.h"

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
  RankedPass announced = {
      .lane = lane_, .copies = {pass.copies.begin(), pass.copies.end()}, .sequences = {}};
  for (const PassSequence& sequence : pass.sequences) {
    RankedPass::Sequence copy = {.blocks = {sequence.blocks.begin(), sequence.blocks.end()},
                                 .start = sequence.start,
                                 .tokens = {sequence.tokens.begin(), sequence.tokens.end()},
                                 .output_rows = {}};
    for (const OutputRow& row : sequence.rows) copy.output_rows.push_back(row.index);
    announced.sequences.push_back(std::move(copy));
  }
  ranks_->Announce(kPassCommand, /*request_id=*/"", announced);
  absl::Status status = shard_->Run(pass, results);
  if (!status.ok() && !IsOfTheRequest(status)) {
    ranks_->Fail(absl::StrCat("a pass failed: ", status.message()));
  }
  return status;
}

absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard) {
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
                         .rows = rows[i]});
  }
  const absl::Status status = shard.Follow({.copies = pass.copies, .sequences = sequences});
  return IsOfTheRequest(status) ? absl::OkStatus() : status;
}

}  // namespace tandem::rollout
