// The sequences that wait, and the order in which they are admitted. Pure logic.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_WAITING_QUEUE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_WAITING_QUEUE_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "services/rollout/engine/schedule/sequence.h"

namespace tandem::rollout {

// The next sequence is chosen by these rules:
//
// 1. The highest priority comes first.
// 2. Streams of equal priority share the running sequences: the stream with the fewest running
//    sequences of that priority comes first; of several, the one whose turn is longest ago. Inside
//    a stream, sequences come in the order of their arrival.
// 3. Before rule 2, samples of a prompt that has begun come before other prompts of the same
//    priority, because they share its prefix: `max_together` samples, then other streams have a
//    turn. A preempted sequence comes before other prompts, too.
// 4. Nothing starves: when kMaxPassedOver sequences in a row were not the one that arrived first,
//    that one is next. So a waiting sequence is passed over by at most
//    kMaxPassedOver * (n + 1) younger ones, where n counts admissions of older ones. If rule 4
//    brings it before a higher priority, it is overdue: until it ends it comes before all
//    priorities, also in passes and in preemption.
class WaitingQueue {
 public:
  static constexpr int64_t kMaxPassedOver = 15;

  explicit WaitingQueue(int64_t max_together) : max_together_(max_together) {}
  WaitingQueue(const WaitingQueue&) = delete;
  WaitingQueue& operator=(const WaitingQueue&) = delete;

  // Adds a new sequence. It must be removed, or taken and ended, before it is destroyed.
  void Add(Sequence* sequence);
  // Returns the next sequence; nullptr if none waits.
  Sequence* Next() const;
  // Removes and returns the next sequence, which counts as running from now on; needs one.
  Sequence* Take();
  // Adds a running sequence again, at the place of its arrival.
  void Return(Sequence* sequence);
  // Removes a sequence that waits.
  void Remove(Sequence* sequence);
  // Tells that a running sequence has ended.
  void End(const Sequence& sequence);

  int64_t size() const { return static_cast<int64_t>(waiting_.size()); }
  bool empty() const { return waiting_.empty(); }

 private:
  using Arrivals = std::map<int64_t, Sequence*>;  // by Sequence::arrival

  // The sequences of one stream and one priority.
  struct Line {
    int32_t priority = 0;
    Arrivals waiting;  // but for overdue ones
    int64_t running = 0;
    int64_t last_turn = 0;
    bool continues = false;  // whether rule 3 holds for the first one
  };
  // Orders lines by rules 1 to 3.
  struct ComesBefore {
    bool operator()(const Line* a, const Line* b) const;
  };

  // Calls `change` with the sequence's line, and moves the line to its new place.
  void ChangeLine(const Sequence& sequence, absl::FunctionRef<void(Line&)> change);
  Sequence* NextInTurn() const { return (*lines_in_order_.begin())->waiting.begin()->second; }

  const int64_t max_together_;
  int64_t now_ = 0;          // counts arrivals and turns
  int64_t passed_over_ = 0;  // admissions since the first arrival came first
  Arrivals waiting_;
  Arrivals overdue_;  // those of waiting_ that were preempted after they had become overdue
  std::map<std::pair<int32_t, uint64_t>, Line> lines_;  // by priority and stream
  std::set<const Line*, ComesBefore> lines_in_order_;   // those with waiting sequences
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_WAITING_QUEUE_H_
