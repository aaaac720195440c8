#include "services/rollout/engine/schedule/scheduler.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "common/model/passes/layer_cache.h"

namespace tandem::rollout {
namespace {

bool UsesLane(Author lane, const Sequence& sequence) {
  const PromptRequest& request = sequence.prompt->request;
  return lane == Author::kSenior || request.tandem.enabled ||
         request.speculative.method == SpeculativeMethod::kJunior;
}

bool Waits(Author lane, const Sequence& sequence) {
  return sequence.Target(lane) > sequence.lane(lane).consumed();
}

// The order of running sequences.
bool ComesBefore(const Sequence* a, const Sequence* b) {
  if (a->overdue != b->overdue) return a->overdue;
  return a->prompt->request.priority > b->prompt->request.priority;
}

}  // namespace

Scheduler::Scheduler(const SchedulerLimits& limits)
    : limits_(limits),
      waiting_(limits.max_num_seqs),
      pools_{BlockPool({.count = limits.num_blocks[0]}),
             BlockPool({.count = limits.num_blocks[1]})} {}

std::vector<const Prompt*> Scheduler::Admit() {
  std::vector<const Prompt*> begun;
  const auto is_full = [&] { return std::ssize(running_) >= limits_.max_num_seqs; };
  if (waiting_.empty() || is_full()) return begun;
  ++admits_;
  std::array<int64_t, 2> unclaimed = {};
  // Prompts whose whole blocks a sample has, or claims, are counted: other samples share them.
  const auto claim = [&](const Sequence& sequence) {
    for (const Author lane : kAuthors) {
      if (!UsesLane(lane, sequence)) continue;
      int64_t has = sequence.lane(lane).table.size();
      int64_t& counted = sequence.prompt->counted[LaneIndex(lane)];
      if (has == 0 && std::exchange(counted, admits_) == admits_) {
        has = (sequence.given_length() - 1) / kKvBlockTokens;
      }
      // For one more token.
      const int64_t missing = std::max<int64_t>(0, KvBlocks(sequence.length() + 1) - has);
      unclaimed[LaneIndex(lane)] -=
          std::min(missing, WindowBlocks(limits_.windows[LaneIndex(lane)]));
    }
  };
  for (const Author lane : kAuthors) {
    unclaimed[LaneIndex(lane)] = pool(lane).num_idle();
    for (const Sequence* sequence : running_) {
      if (!sequence->lane(lane).table.empty()) {
        sequence->prompt->counted[LaneIndex(lane)] = admits_;
      }
    }
  }
  for (const Sequence* sequence : running_) claim(*sequence);
  while (!waiting_.empty() && !is_full()) {
    claim(*waiting_.Next());
    // A sequence alone always fits.
    if (!running_.empty() && std::ranges::min(unclaimed) < 0) break;
    const bool is_new = !waiting_.Next()->begun;
    Sequence* const next = waiting_.Take();
    if (is_new) {
      next->ReserveResponse();
      if (next->prompt->samples_begun == 1) begun.push_back(next->prompt);
    }
    next->last_pass = passes_;
    running_.insert(std::ranges::upper_bound(running_, next, ComesBefore), next);
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

bool Scheduler::TakePrefix(Author lane, Sequence& sequence) {
  LaneState& state = sequence.lane(lane);
  BlockPool& blocks = pool(lane);
  const int64_t most = sequence.FirstWanted(lane);
  // The last prompt token is always consumed, because the response starts from its row.
  const int64_t shared = std::min(sequence.given_length() - 1, most);
  if (sequence.prompt->read_in_pass[LaneIndex(lane)] == passes_ + 1) return false;
  const Sequence* sibling = nullptr;
  for (const auto& other : sequence.prompt->samples) {
    if (other == nullptr || other.get() == &sequence) continue;
    const LaneState& theirs = other->lane(lane);
    const int64_t tail = shared / kKvBlockTokens;  // the block that would be copied
    if (theirs.cursor >= shared && theirs.epoch == epochs_[LaneIndex(lane)] &&
        theirs.table.num_dropped() <= tail) {
      sibling = other.get();
      break;
    }
  }
  state.epoch = epochs_[LaneIndex(lane)];
  state.cursor = state.table.TakeKnown(blocks, std::span(sequence.tokens).first(most),
                                       sequence.prompt->image_tokens);
  // The tokens after the last whole block are copied from the other sample.
  const int64_t tail = state.table.size();
  if (sibling != nullptr && state.cursor < shared && shared < state.cursor + kKvBlockTokens &&
      state.table.Grow(blocks)) {
    plan(lane).copies.push_back(
        {.from = sibling->lane(lane).table.blocks()[tail], .to = state.table.blocks()[tail]});
    state.cursor = shared;
  } else if (sibling == nullptr) {
    state.cursor += state.table.TakeBegun(blocks, std::span(sequence.tokens).first(most),
                                          sequence.prompt->image_tokens);
  }
  shared_tokens_total_ += state.cursor;
  DropUnread(lane, state);
  return true;
}

bool Scheduler::PreemptAfter(size_t index, Author lane) {
  for (size_t i = running_.size(); --i > index;) {
    Sequence* const victim = running_[i];
    if (IsPlanned(*victim) || victim->lane(lane).table.empty()) continue;
    for (const Author each : kAuthors) ReleaseBlocks(each, *victim);
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    waiting_.Return(victim);
    ++preemptions_total_;
    return true;
  }
  return false;
}

int64_t Scheduler::Grow(Author lane, Sequence& sequence, int64_t tokens) {
  BlockTable& table = sequence.lane(lane).table;
  while (table.size() < KvBlocks(tokens) && table.Grow(pool(lane))) {
  }
  return std::min(tokens, table.size() * kKvBlockTokens);
}

int64_t Scheduler::Reserve(Author lane, size_t index, int64_t tokens) {
  while (true) {
    const int64_t held = Grow(lane, *running_[index], tokens);
    if (held == tokens || !PreemptAfter(index, lane)) return held;
  }
}

int64_t Scheduler::PlanEntry(Author lane, size_t index, int64_t budget) {
  Sequence& sequence = *running_[index];
  LaneState& state = sequence.lane(lane);
  if (state.table.empty() && !TakePrefix(lane, sequence)) return 0;
  const int64_t target = sequence.Target(lane);
  const int64_t begin = state.consumed();
  const bool drafting = sequence.drafting();
  const int64_t wanted = std::min(target, begin + budget);
  const int64_t end = drafting ? Grow(lane, sequence, wanted) : Reserve(lane, index, wanted);
  if (drafting && end < wanted) {  // drafts are not worth a preemption
    sequence.drafts->length.Pause();
    sequence.drafts->wanted = 0;
  }
  if (end <= begin) return 0;
  const bool writes = drafting || (!sequence.ended() && sequence.selector.NextAuthor() == lane);
  plan(lane).entries.push_back({.sequence = &sequence,
                                .begin = begin,
                                .end = end,
                                .draws = writes && end == target ? 1 : 0,
                                .drafting = drafting});
  sequence.last_pass = passes_ + 1;
  if (state.cursor < sequence.given_length() - 1) {
    sequence.prompt->read_in_pass[LaneIndex(lane)] = passes_ + 1;
  }
  return end - begin;
}

void Scheduler::AskForDrafts() {
  for (Sequence* const sequence : running_) {
    if (sequence->drafts == nullptr) continue;
    DraftState& drafts = *sequence->drafts;
    if (drafts.method != SpeculativeMethod::kJunior) continue;
    if (sequence->selector.NextAuthor() != Author::kSenior) continue;
    drafts.wanted = drafts.closed ? 0 : CountWanted(*sequence);
  }
}

int64_t Scheduler::CountWanted(const Sequence& sequence) const {
  const DraftState& drafts = *sequence.drafts;
  // The pass that verifies the drafts also consumes what the senior has not: a prompt, or tokens of
  // the junior.
  const int64_t unread = sequence.length() - sequence.lane(Author::kSenior).consumed();
  const int64_t tokens = limits_.max_tokens_with_drafts;
  const int64_t share = tokens / std::max<int64_t>(1, std::ssize(running_)) - 1;
  const int64_t most =
      std::max<int64_t>(0, std::min({share, tokens - unread, drafts.length.Next()}));
  std::array<int32_t, kMaxSpeculativeTokens> possible;
  possible.fill(-1);
  std::ranges::copy(drafts.tokens, possible.begin());
  return sequence.CountUsable(std::span(possible).first(most));
}

int64_t Scheduler::ProposeDrafts(Author lane, Sequence& sequence, int64_t most) {
  DraftState& drafts = *sequence.drafts;
  if (drafts.drafter != nullptr) {
    const int64_t wanted = std::min(most, drafts.length.Next());
    if (wanted > 0) drafts.drafter->Propose(sequence.tokens, wanted, drafts.tokens);
  }
  const int64_t proposed = std::min<int64_t>(most, std::ssize(drafts.tokens));
  const int64_t usable = sequence.CountUsable(std::span(drafts.tokens).first(proposed));
  return Grow(lane, sequence, sequence.length() + usable) - sequence.length();
}

void Scheduler::PlanDrafts(Author lane, int64_t room) {
  const auto verifies = [](const PassEntry& entry) {
    return entry.draws > 0 && !entry.drafting && entry.sequence->drafts != nullptr;
  };
  int64_t left = std::ranges::count_if(plan(lane).entries, verifies);
  for (PassEntry& entry : plan(lane).entries) {
    if (!verifies(entry)) continue;
    const int64_t added = ProposeDrafts(lane, *entry.sequence, std::max<int64_t>(0, room) / left);
    entry.end += added;
    entry.draws += added;
    room -= added;
    --left;
  }
}

PassPlan& Scheduler::NewPlan(Author lane) {
  newest_[LaneIndex(lane)] ^= 1;
  PassPlan& planned_pass = plan(lane);
  planned_pass.entries.clear();
  planned_pass.copies.clear();
  return planned_pass;
}

void Scheduler::OnPlanned(Author lane) {
  ++passes_;
  last_lane_ = lane;
}

const PassPlan& Scheduler::Plan(Author lane) {
  PassPlan& planned_pass = NewPlan(lane);
  int64_t budget = limits_.max_batched_tokens;
  for (const bool reads_prompt : {false, true}) {
    // Preemption shortens running_, behind `index`.
    for (size_t index = 0; index < running_.size() && budget > 0; ++index) {
      const Sequence& sequence = *running_[index];
      const bool reads = sequence.lane(lane).cursor < sequence.given_length() - 1;
      if (reads == reads_prompt && Waits(lane, sequence) && !IsPlanned(sequence)) {
        budget -= PlanEntry(lane, index, budget);
      }
    }
  }
  if (planned_pass.entries.empty()) return planned_pass;
  const int64_t planned = limits_.max_batched_tokens - budget;
  PlanDrafts(lane, std::min(limits_.max_batched_tokens, limits_.max_tokens_with_drafts) - planned);
  OnPlanned(lane);
  return planned_pass;
}

const PassPlan* Scheduler::PlanAhead(Author lane) {
  const std::vector<PassEntry>& runs = plan(lane).entries;
  if (runs.size() != running_.size()) return nullptr;
  bool goes_on = false;
  for (const PassEntry& entry : runs) {
    Sequence& sequence = *entry.sequence;
    if (entry.draws == 0 || sequence.NeedsHost()) return nullptr;
    if (sequence.EndsWithNext()) continue;
    if (sequence.selector.AuthorAfterNext() != lane) return nullptr;
    if (Grow(lane, sequence, entry.end + 1) <= entry.end) return nullptr;
    goes_on = true;
  }
  if (!goes_on) return nullptr;
  PassPlan& ahead = NewPlan(lane);
  for (size_t i = 0; i < runs.size(); ++i) {
    Sequence& sequence = *runs[i].sequence;
    if (sequence.EndsWithNext()) continue;
    ahead.entries.push_back({.sequence = &sequence,
                             .begin = runs[i].end,
                             .end = runs[i].end + 1,
                             .draws = 1,
                             .follows = static_cast<int64_t>(i)});
    sequence.last_pass = passes_ + 1;
  }
  OnPlanned(lane);
  return &ahead;
}

void Scheduler::DropUnread(Author lane, LaneState& state) {
  const int64_t first_key = FirstKey(state.cursor, limits_.windows[LaneIndex(lane)]);
  state.table.DropFirst(pool(lane), first_key / kKvBlockTokens);
}

void Scheduler::Confirm(Author lane, Sequence& sequence) {
  LaneState& state = sequence.lane(lane);
  if (sequence.running_passes == 0) state.table.Shrink(pool(lane), KvBlocks(state.consumed()));
  if (state.epoch == epochs_[LaneIndex(lane)]) {
    state.table.Remember(pool(lane), std::span(sequence.tokens).first(state.cursor),
                         sequence.prompt->image_tokens);
  }
  DropUnread(lane, state);
}

void Scheduler::Advance(Author lane, const PassEntry& entry, int64_t rejected) {
  Sequence& sequence = *entry.sequence;
  LaneState& state = sequence.lane(lane);
  state.cursor = entry.end - rejected;
  if (entry.drafting) {
    // The row of the last token is wanted again once the senior has written the next one.
    const int64_t known = sequence.length() - (sequence.wants_other ? 1 : 0);
    state.cursor = std::min(entry.end, known);
    state.ahead = entry.end - state.cursor;
  }
  Confirm(lane, sequence);
  if (!entry.drafting && entry.draws > 0 && sequence.drafts != nullptr) {
    SettleDrafts(sequence, entry.draws - 1 - rejected, rejected > 0);
  }
}

void Scheduler::SettleDrafts(Sequence& sequence, int64_t accepted, bool any_rejected) {
  DraftState& drafts = *sequence.drafts;
  // The last token that was drawn may be the draft behind those that the pass had room for. Drafts
  // of rejection sampling are drawn anew.
  const bool goes_on = drafts.method == SpeculativeMethod::kJunior && drafts.sampled.empty() &&
                       !any_rejected && accepted < std::ssize(drafts.tokens) &&
                       drafts.tokens[accepted] == sequence.tokens.back();
  const int64_t right = accepted + (goes_on ? 1 : 0);
  if (goes_on) {
    drafts.tokens.erase(drafts.tokens.begin(), drafts.tokens.begin() + right);
  } else {
    drafts.tokens.clear();
    drafts.sampled.clear();
    drafts.closed = false;
  }
  LaneState& junior = sequence.lane(Author::kJunior);
  if (junior.ahead == 0) return;
  const int64_t read = sequence.wants_other ? 0 : std::min(right, junior.ahead);
  junior.cursor += read;
  junior.ahead = goes_on && !sequence.wants_other ? junior.ahead - read : 0;
  Confirm(Author::kJunior, sequence);
}

void Scheduler::ReleaseBlocks(Author lane, Sequence& sequence) {
  LaneState& state = sequence.lane(lane);
  // For the prompt that continues the sequence, or for itself, after a preemption.
  if (!state.table.empty() && state.epoch == epochs_[LaneIndex(lane)]) {
    state.table.RememberBegun(pool(lane), std::span(sequence.tokens).first(state.cursor),
                              sequence.prompt->image_tokens);
  }
  state.table.Release(pool(lane));
  state.cursor = 0;
  state.ahead = 0;
}

void Scheduler::Remove(Sequence* sequence) {
  if (sequence->waits) {
    waiting_.Remove(sequence);
    return;
  }
  for (const Author lane : kAuthors) ReleaseBlocks(lane, *sequence);
  std::erase(running_, sequence);
  waiting_.End(*sequence);
}

void Scheduler::BumpEpoch(Author lane, bool recompute) {
  ++epochs_[LaneIndex(lane)];
  pool(lane).Forget();
  if (!recompute) return;
  for (Sequence* sequence : running_) ReleaseBlocks(lane, *sequence);
}

}  // namespace tandem::rollout
