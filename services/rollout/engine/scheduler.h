// Decides what each forward pass consumes. Pure logic: no tensors, no threads, no clock.
//
// There is no prefill and no decode, only lanes that catch up: when a model must write the next
// token of a sequence, it first consumes what it has not seen (the prompt, or the other model's run
// of tokens) and writes from the last row.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "services/rollout/engine/sequence.h"

namespace tandem::rollout {

struct SchedulerLimits {
  int64_t max_num_seqs = 64;          // sequences that run at the same time
  int64_t max_batched_tokens = 2048;  // tokens that one pass consumes
};

// One sequence's part in a pass: its tokens [begin, end).
struct PassEntry {
  Sequence* sequence = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
  // The model's head runs on the last so many of them.
  int64_t num_output_rows = 0;
  // The last row is the one that the next token is drawn from.
  bool samples = false;
  // Before the pass the lane takes over the first `begin` tokens of this sample of the same prompt.
  const Sequence* copy_prefix_from = nullptr;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits) : limits_(limits) {}

  // Puts a sequence at the end of the queue.
  void Enqueue(Sequence* sequence) { waiting_.push_back(sequence); }

  // Moves waiting sequences, in order, into free places; returns those that began.
  std::vector<Sequence*> Admit();

  // The sequences, oldest first, that need `lane`'s model now, within the token budget. A sequence
  // whose rest does not fit consumes a part (chunked prefill). A sample whose prompt another sample
  // has consumed, or consumes in this pass, takes it over instead of computing it again.
  std::vector<PassEntry> Plan(Author lane) const;

  // The entry has been computed.
  void Advance(Author lane, const PassEntry& entry);

  // Forgets a sequence, wherever it is.
  void Remove(const Sequence* sequence);

  // The lane's weights changed. Keys and values of before are never given to another sample; with
  // `recompute` every running sequence consumes its tokens again.
  void BumpEpoch(Author lane, bool recompute);

  const std::vector<Sequence*>& running() const { return running_; }
  const std::deque<Sequence*>& waiting() const { return waiting_; }
  bool idle() const { return running_.empty() && waiting_.empty(); }

 private:
  enum class Prefix { kOwn, kCopy, kWait };
  // What a lane at the start of its prompt should do.
  Prefix FindPrefix(Author lane, const Sequence& sequence, const std::vector<PassEntry>& planned,
                    const Sequence** source) const;

  SchedulerLimits limits_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;  // in the order of admission
  std::array<int64_t, 2> epochs_ = {0, 0};
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_
