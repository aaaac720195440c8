#include "services/rollout/engine/scheduler.h"

#include <algorithm>

namespace tandem::rollout {

std::vector<Sequence*> Scheduler::Admit() {
  std::vector<Sequence*> begun;
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < limits_.max_num_seqs) {
    begun.push_back(waiting_.front());
    running_.push_back(waiting_.front());
    waiting_.pop_front();
  }
  return begun;
}

Scheduler::Prefix Scheduler::FindPrefix(Author lane, const Sequence& sequence,
                                        const std::vector<PassEntry>& planned,
                                        const Sequence** source) const {
  // The last prompt token is always consumed, because the response starts from its row.
  const int64_t shared = sequence.prompt_length() - 1;
  if (sequence.lane(lane).cursor > 0 || shared < 1) return Prefix::kOwn;
  for (const auto& other : sequence.prompt->samples) {
    if (other == nullptr || other.get() == &sequence) continue;
    const LaneState& state = other->lane(lane);
    if (state.slot != LaneState::kNoSlot && state.cursor >= shared &&
        state.epoch == epochs_[LaneIndex(lane)]) {
      *source = other.get();
      return Prefix::kCopy;
    }
  }
  for (const PassEntry& entry : planned) {
    if (entry.sequence->prompt == sequence.prompt && entry.begin < shared) return Prefix::kWait;
  }
  return Prefix::kOwn;
}

std::vector<PassEntry> Scheduler::Plan(Author lane) const {
  std::vector<PassEntry> entries;
  int64_t budget = limits_.max_batched_tokens;
  for (Sequence* sequence : running_) {
    if (budget == 0) break;
    const int64_t target = sequence->Target(lane);
    PassEntry entry = {.sequence = sequence, .begin = sequence->lane(lane).cursor};
    if (target <= entry.begin) continue;
    switch (FindPrefix(lane, *sequence, entries, &entry.copy_prefix_from)) {
      case Prefix::kWait:
        continue;
      case Prefix::kCopy:
        entry.begin = sequence->prompt_length() - 1;
        break;
      case Prefix::kOwn:
        break;
    }
    const int64_t count = std::min(target - entry.begin, budget);
    entry.end = entry.begin + count;
    entry.samples = !sequence->ended() && entry.end == target;
    int64_t first_row = entry.samples ? entry.end - 1 : entry.end;
    for (int64_t position = entry.begin; position < first_row; ++position) {
      if (sequence->NeedsOther(lane, position)) first_row = position;
    }
    entry.num_output_rows = entry.end - first_row;
    budget -= count;
    entries.push_back(entry);
  }
  return entries;
}

void Scheduler::Advance(Author lane, const PassEntry& entry) {
  LaneState& state = entry.sequence->lane(lane);
  if (state.cursor == 0) state.epoch = epochs_[LaneIndex(lane)];
  state.cursor = entry.end;
}

void Scheduler::Remove(const Sequence* sequence) {
  std::erase(running_, sequence);
  std::erase(waiting_, sequence);
}

void Scheduler::BumpEpoch(Author lane, bool recompute) {
  ++epochs_[LaneIndex(lane)];
  if (!recompute) return;
  for (Sequence* sequence : running_) sequence->lane(lane).cursor = 0;
}

}  // namespace tandem::rollout
