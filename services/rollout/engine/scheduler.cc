#include "services/rollout/engine/scheduler.h"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "common/model/layer_cache.h"

namespace tandem::rollout {
namespace {

bool UsesLane(Author lane, const Sequence& sequence) {
  return lane == Author::kSenior || sequence.prompt->request.tandem.enabled;
}

bool Waits(Author lane, const Sequence& sequence) {
  return sequence.Target(lane) > sequence.lane(lane).cursor;
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits)
    : limits_(limits),
      pools_{BlockPool({.count = limits.num_blocks[0]}),
             BlockPool({.count = limits.num_blocks[1]})} {}

std::vector<const Prompt*> Scheduler::Admit() {
  std::vector<const Prompt*> begun;
  if (waiting_.empty()) return begun;
  std::array<int64_t, 2> unclaimed = {};
  // Prompts whose whole blocks a sample has, or claims: its other samples share them.
  std::array<std::set<const Prompt*>, 2> prefixes;
  const auto claim = [&](const Sequence& sequence) {
    for (const Author lane : kAuthors) {
      if (!UsesLane(lane, sequence)) continue;
      int64_t has = sequence.lane(lane).table.size();
      if (has == 0 && !prefixes[LaneIndex(lane)].insert(sequence.prompt).second) {
        has = (sequence.prompt_length() - 1) / kKvBlockTokens;
      }
      // For one more token.
      unclaimed[LaneIndex(lane)] -= std::max<int64_t>(0, KvBlocks(sequence.length() + 1) - has);
    }
  };
  for (const Author lane : kAuthors) {
    unclaimed[LaneIndex(lane)] = pool(lane).num_idle();
    for (const Sequence* sequence : running_) {
      if (!sequence->lane(lane).table.empty()) prefixes[LaneIndex(lane)].insert(sequence->prompt);
    }
  }
  for (const Sequence* sequence : running_) claim(*sequence);
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < limits_.max_num_seqs) {
    Sequence* const next = waiting_.front();
    claim(*next);
    // A sequence alone always fits.
    if (!running_.empty() && std::ranges::min(unclaimed) < 0) break;
    next->last_pass = passes_;
    if (!std::exchange(next->prompt->admitted, true)) begun.push_back(next->prompt);
    running_.push_back(next);
    waiting_.pop_front();
  }
  return begun;
}

std::array<Author, 2> Scheduler::LaneOrder() const {
  std::array<int64_t, 2> waited = {};
  for (const Sequence* sequence : running_) {
    for (const Author lane : kAuthors) {
      if (Waits(lane, *sequence)) waited[LaneIndex(lane)] += passes_ - sequence->last_pass + 1;
    }
  }
  const int64_t difference = waited[0] - waited[1];
  const bool senior_first = difference > 0 || (difference == 0 && last_lane_ == Author::kJunior);
  if (senior_first) return {Author::kSenior, Author::kJunior};
  return {Author::kJunior, Author::kSenior};
}

bool Scheduler::TakePrefix(Author lane, Sequence& sequence, PassPlan& plan) {
  LaneState& state = sequence.lane(lane);
  BlockPool& blocks = pool(lane);
  const int64_t most = sequence.FirstWanted(lane);
  // The last prompt token is always consumed, because the response starts from its row.
  const int64_t shared = std::min(sequence.prompt_length() - 1, most);
  const Sequence* sibling = nullptr;
  for (const auto& other : sequence.prompt->samples) {
    if (other == nullptr || other.get() == &sequence) continue;
    const LaneState& theirs = other->lane(lane);
    if (theirs.cursor >= shared && theirs.epoch == epochs_[LaneIndex(lane)]) {
      sibling = other.get();
      break;
    }
  }
  if (sibling == nullptr) {
    for (const PassEntry& entry : plan.entries) {
      if (entry.sequence->prompt == sequence.prompt && entry.begin < shared) return false;
    }
  }
  state.epoch = epochs_[LaneIndex(lane)];
  state.cursor = state.table.TakeKnown(blocks, std::span(sequence.tokens).first(most));
  // The tokens after the last whole block are copied from the other sample.
  const int64_t tail = state.table.size();
  if (sibling != nullptr && state.cursor < shared && shared < state.cursor + kKvBlockTokens &&
      state.table.Grow(blocks)) {
    plan.copies.push_back(
        {.from = sibling->lane(lane).table.blocks()[tail], .to = state.table.blocks()[tail]});
    state.cursor = shared;
  }
  shared_tokens_total_ += state.cursor;
  return true;
}

bool Scheduler::PreemptAfter(size_t index, Author lane, const PassPlan& plan) {
  for (size_t i = running_.size(); --i > index;) {
    Sequence* const victim = running_[i];
    const bool planned = std::ranges::any_of(
        plan.entries, [&](const PassEntry& entry) { return entry.sequence == victim; });
    if (planned || victim->lane(lane).table.empty()) continue;
    for (const Author each : kAuthors) ReleaseBlocks(each, *victim);
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    waiting_.push_front(victim);
    ++preemptions_total_;
    return true;
  }
  return false;
}

int64_t Scheduler::Reserve(Author lane, size_t index, int64_t tokens, const PassPlan& plan) {
  BlockTable& table = running_[index]->lane(lane).table;
  while (table.size() < KvBlocks(tokens)) {
    if (!table.Grow(pool(lane)) && !PreemptAfter(index, lane, plan)) break;
  }
  return std::min(tokens, table.size() * kKvBlockTokens);
}

int64_t Scheduler::PlanEntry(Author lane, size_t index, int64_t budget, PassPlan& plan) {
  Sequence& sequence = *running_[index];
  LaneState& state = sequence.lane(lane);
  if (state.table.empty() && !TakePrefix(lane, sequence, plan)) return 0;
  const int64_t target = sequence.Target(lane);
  const int64_t end = Reserve(lane, index, std::min(target, state.cursor + budget), plan);
  if (end <= state.cursor) return 0;
  plan.entries.push_back(
      {.sequence = &sequence,
       .begin = state.cursor,
       .end = end,
       .samples = !sequence.ended() && end == target && sequence.selector.NextAuthor() == lane});
  return end - state.cursor;
}

PassPlan Scheduler::Plan(Author lane) {
  PassPlan plan;
  int64_t budget = limits_.max_batched_tokens;
  for (const bool reads_prompt : {false, true}) {
    // Preemption shortens running_, behind `index`.
    for (size_t index = 0; index < running_.size() && budget > 0; ++index) {
      const Sequence& sequence = *running_[index];
      const bool reads = sequence.lane(lane).cursor < sequence.prompt_length() - 1;
      if (reads == reads_prompt && Waits(lane, sequence)) {
        budget -= PlanEntry(lane, index, budget, plan);
      }
    }
  }
  if (plan.entries.empty()) return plan;
  ++passes_;
  last_lane_ = lane;
  for (const PassEntry& entry : plan.entries) entry.sequence->last_pass = passes_;
  return plan;
}

void Scheduler::Advance(Author lane, const PassEntry& entry) {
  LaneState& state = entry.sequence->lane(lane);
  state.cursor = entry.end;
  if (state.epoch != epochs_[LaneIndex(lane)]) return;
  state.table.Remember(pool(lane), std::span(entry.sequence->tokens).first(state.cursor));
}

void Scheduler::ReleaseBlocks(Author lane, Sequence& sequence) {
  LaneState& state = sequence.lane(lane);
  state.table.Release(pool(lane));
  state.cursor = 0;
}

void Scheduler::Remove(Sequence* sequence) {
  for (const Author lane : kAuthors) ReleaseBlocks(lane, *sequence);
  std::erase(running_, sequence);
  std::erase(waiting_, sequence);
}

void Scheduler::BumpEpoch(Author lane, bool recompute) {
  ++epochs_[LaneIndex(lane)];
  pool(lane).Forget();
  if (!recompute) return;
  for (Sequence* sequence : running_) ReleaseBlocks(lane, *sequence);
}

}  // namespace tandem::rollout
