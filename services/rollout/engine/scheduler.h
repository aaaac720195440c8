// Decides what each forward pass consumes. Pure logic: no tensors, no threads, no clock.
//
// There is no prefill and no decode, only lanes that catch up: when a model must write the next
// token of a sequence, it first consumes the tokens that it has not seen (the prompt, or the other
// model's run of tokens) and writes from the last row.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "services/rollout/engine/sequence.h"

namespace tandem::rollout {

struct SchedulerLimits {
  int64_t max_num_seqs;        // sequences that run at the same time
  int64_t max_batched_tokens;  // tokens that one pass consumes
};

// One sequence in a pass: the pass consumes its tokens [begin, end).
struct PassEntry {
  Sequence* sequence = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
  // The model's head runs on this many of the last tokens.
  int64_t num_output_rows = 0;
  // Whether the next token is drawn from the last row.
  bool samples = false;
  // If set, the lane copies the first `begin` tokens from this sample of the same prompt first.
  const Sequence* copy_prefix_from = nullptr;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits) : limits_(limits) {}

  // Puts a sequence at the end of the queue.
  void Enqueue(Sequence* sequence) { waiting_.push_back(sequence); }

  // Starts waiting sequences, in order, up to max_num_seqs; returns those that were started.
  std::vector<Sequence*> Admit();

  // Returns the sequences, oldest first, that need `lane`'s model now, within the token budget. A
  // sequence that does not fit consumes as many tokens as do (chunked prefill). A sample copies the
  // prompt from another sample that has consumed it, or consumes it in this pass.
  std::vector<PassEntry> Plan(Author lane) const;

  // Records that the entry has been computed.
  void Advance(Author lane, const PassEntry& entry);

  // Removes a sequence, waiting or running.
  void Remove(const Sequence* sequence);

  // Tells that the lane's weights changed. Earlier keys and values are no longer copied to another
  // sample; with `recompute` every running sequence consumes its tokens again.
  void BumpEpoch(Author lane, bool recompute);

  const std::vector<Sequence*>& running() const { return running_; }
  const std::deque<Sequence*>& waiting() const { return waiting_; }
  bool idle() const { return running_.empty() && waiting_.empty(); }

 private:
  enum class Prefix { kOwn, kCopy, kWait };
  // Returns what a lane does at the start of a prompt.
  Prefix FindPrefix(Author lane, const Sequence& sequence, const std::vector<PassEntry>& planned,
                    const Sequence** source) const;

  SchedulerLimits limits_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;  // in the order of admission
  std::array<int64_t, 2> epochs_ = {0, 0};
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULER_H_
