// Decides which model runs next, what each forward pass consumes, and which blocks of the KV cache
// each sequence has. Pure logic: no tensors, no threads, no clock.
//
// There is no prefill and no decode, only lanes that catch up: when a model must write the next
// token of a sequence, it first consumes the tokens that it has not seen (the prompt, or the other
// model's run of tokens) and writes from the last row.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCHEDULER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCHEDULER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/kernels/attention_window.h"
#include "services/rollout/engine/blocks/block_pool.h"
#include "services/rollout/engine/drafts/draft_room.h"
#include "services/rollout/engine/models/model_runner.h"
#include "services/rollout/engine/schedule/sequence.h"
#include "services/rollout/engine/schedule/waiting_queue.h"

namespace tandem::rollout {

struct SchedulerLimits {
  int64_t max_num_seqs;        // sequences that run at the same time
  int64_t max_batched_tokens;  // tokens that one pass consumes
  // The first blocks of each lane's cache, enough for the longest sequence.
  std::array<int64_t, 2> num_blocks;
  // The longest window of each lane's layers: no row reads the blocks before it.
  std::array<int64_t, 2> windows = {kNoWindow, kNoWindow};
  // Tokens of a pass with drafts (MaxTokensWithDrafts), which are cut where many sequences run.
  int64_t max_tokens_with_drafts = kHostTokensWithDrafts;
};

// One sequence in a pass: the pass consumes [begin, end) of its tokens with its drafts behind them.
struct PassEntry {
  Sequence* sequence = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
  // Number of rows from which tokens are drawn, the last ones: the row of the sequence's last token
  // and those of its drafts.
  int64_t draws = 0;
  bool drafting = false;  // the drawn token is a draft
  // Planned ahead: the entry of the lane's pass before that draws the one token that this entry
  // consumes. kNone: the tokens are there.
  static constexpr int64_t kNone = -1;
  int64_t follows = kNone;
};

struct PassPlan {
  std::vector<PassEntry> entries;
  std::vector<BlockCopy> copies;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits);

  // Puts a sequence into the queue.
  void Enqueue(Sequence* sequence) { waiting_.Add(sequence); }

  // Starts waiting sequences, in the order of waiting_queue.h, up to max_num_seqs and as far as
  // there are blocks for their tokens: while there are none for the next sequence, the others wait.
  // Returns the prompts whose first sample was started.
  std::vector<const Prompt*> Admit();

  // Returns the lanes in the order in which they should run: first the one whose sequences have
  // waited for most passes in sum. So models take turns where each has work for half of the
  // sequences; where one has little, that gathers; and nobody waits for ever.
  std::array<Author, 2> LaneOrder() const;

  // Decides for which sequences the junior writes drafts next, and how many.
  void AskForDrafts();

  // Returns how many drafts the senior's next pass can verify for the sequence, those that it has
  // included. A draft that is not known yet may make it fewer (Sequence::CountUsable).
  int64_t CountWanted(const Sequence& sequence) const;

  // Plans a pass of `lane`'s model within the token budget: sequences that are being written before
  // those that read their prompt, each in the order of running(). A sequence that does not fit
  // consumes as many tokens as do (chunked prefill). Prefixes that the cache contains are shared,
  // not consumed; a sample waits while another sample of its prompt consumes the prompt. Gives the
  // sequences their blocks. If there are none, the last of running() is preempted: it gives up its
  // blocks, waits, and consumes its tokens again when it is admitted. The first of running() is
  // never preempted, so something always ends. Drafts get the budget and the blocks that are left
  // when all sequences are planned. Sequences of passes that run are left as they are. The plan is
  // valid until the next but one of the lane.
  const PassPlan& Plan(Author lane);

  // Plans the pass behind the lane's last plan, which runs, before the tokens that it draws are
  // known: one token more of each of its sequences. Returns nullptr unless that is the pass that
  // Plan would plan later, but for sequences that a token ends: where the plan lacks a sequence of
  // running(), or another author may follow, the host needs a token, or no block is idle.
  const PassPlan* PlanAhead(Author lane);

  // Records that the entry has been computed, and that the sequence did not keep the last
  // `rejected` of the tokens that it consumed. Blocks of rejected drafts alone are given back.
  void Advance(Author lane, const PassEntry& entry, int64_t rejected = 0);

  // Removes a sequence, waiting or running, and releases its blocks.
  void Remove(Sequence* sequence);

  // Tells that the lane's weights changed. Earlier keys and values are no longer shared; with
  // `recompute` every running sequence consumes its tokens again.
  void BumpEpoch(Author lane, bool recompute);

  // Overdue sequences first, then by priority; equal ones in the order of their admission.
  const std::vector<Sequence*>& running() const { return running_; }
  int64_t num_waiting() const { return waiting_.size(); }
  bool idle() const { return running_.empty() && waiting_.empty(); }
  int64_t num_held_blocks(Author lane) const { return pools_[LaneIndex(lane)].num_held(); }
  int64_t preemptions_total() const { return preemptions_total_; }
  int64_t shared_tokens_total() const { return shared_tokens_total_; }

 private:
  BlockPool& pool(Author lane) { return pools_[LaneIndex(lane)]; }
  // The lane's last plan.
  PassPlan& plan(Author lane) { return plans_[LaneIndex(lane)][newest_[LaneIndex(lane)]]; }
  // Makes an empty plan the lane's last one.
  PassPlan& NewPlan(Author lane);
  // Counts the pass that was planned.
  void OnPlanned(Author lane);
  // Whether the sequence is in the pass that is being planned, or in one that runs.
  bool IsPlanned(const Sequence& sequence) const {
    return sequence.last_pass == passes_ + 1 || sequence.running_passes > 0;
  }
  // Plans running_[index] for at most `budget` tokens; returns the number of tokens planned.
  int64_t PlanEntry(Author lane, size_t index, int64_t budget);
  // Adds to the entries that write as many drafts as are proposed, `room` in all at most.
  void PlanDrafts(Author lane, int64_t room);
  // Returns how many drafts of the sequence the pass verifies, at most `most`: the first ones.
  int64_t ProposeDrafts(Author lane, Sequence& sequence, int64_t most);
  // Gives back the blocks before the window of the next row.
  void DropUnread(Author lane, LaneState& state);
  // Remembers the whole blocks of the tokens before the cursor, and gives back the blocks before
  // the window of the next row and, unless a pass of the sequence runs that writes there, those
  // after the tokens that were consumed.
  void Confirm(Author lane, Sequence& sequence);
  // Drops the drafts of a sequence that the senior has written to, and tells the junior's lane how
  // many of those that it wrote were accepted. The junior's stay that no pass had room for and that
  // still go on from the sequence's tokens: they cost a pass each.
  void SettleDrafts(Sequence& sequence, int64_t accepted, bool any_rejected);
  // Gives a lane that has consumed nothing the blocks of the tokens that the cache contains, the
  // last of which may be a begun one. Returns false if the sequence should wait for another sample
  // of its prompt.
  bool TakePrefix(Author lane, Sequence& sequence);
  // Gives a sequence idle blocks for its first `tokens` tokens, or for as many as it can get;
  // returns how many tokens its blocks hold then, at most `tokens`.
  int64_t Grow(Author lane, Sequence& sequence, int64_t tokens);
  // As Grow does, for running_[index]; preempts others if no block is idle.
  int64_t Reserve(Author lane, size_t index, int64_t tokens);
  // Preempts the last sequence after running_[index] that has blocks in `lane` and is not planned.
  // Returns false if there is none.
  bool PreemptAfter(size_t index, Author lane);
  void ReleaseBlocks(Author lane, Sequence& sequence);

  SchedulerLimits limits_;
  WaitingQueue waiting_;
  std::vector<Sequence*> running_;
  std::array<BlockPool, 2> pools_;
  std::array<int64_t, 2> epochs_ = {0, 0};
  std::array<std::array<PassPlan, 2>, 2> plans_;  // of each lane; kept so that their memory is
  std::array<size_t, 2> newest_ = {};             // in the plans of each lane
  int64_t passes_ = 0;                            // planned so far
  int64_t admits_ = 0;                            // calls of Admit that counted blocks
  Author last_lane_ = Author::kJunior;
  int64_t preemptions_total_ = 0;
  int64_t shared_tokens_total_ = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_SCHEDULER_H_
