#include "services/rollout/engine/schedule/waiting_queue.h"

#include <tuple>
#include <utility>

namespace tandem::rollout {

bool WaitingQueue::ComesBefore::operator()(const Line* a, const Line* b) const {
  // Turns are different numbers.
  return std::tuple(-static_cast<int64_t>(a->priority), !a->continues, a->running, a->last_turn) <
         std::tuple(-static_cast<int64_t>(b->priority), !b->continues, b->running, b->last_turn);
}

void WaitingQueue::ChangeLine(const Sequence& sequence, absl::FunctionRef<void(Line&)> change) {
  const Prompt& prompt = *sequence.prompt;
  const int32_t priority = prompt.request.priority;
  const auto [place, is_new] = lines_.try_emplace({priority, prompt.stream});
  Line& line = place->second;
  if (is_new) {
    line.priority = priority;
    line.last_turn = ++now_;
  } else {
    lines_in_order_.erase(&line);
  }
  change(line);
  if (!line.waiting.empty()) {
    const Sequence& first = *line.waiting.begin()->second;
    line.continues = first.begun || first.prompt->samples_begun % max_together_ != 0;
    lines_in_order_.insert(&line);
  } else if (line.running == 0) {
    lines_.erase(place);
  }
}

void WaitingQueue::Add(Sequence* sequence) {
  sequence->waits = true;
  sequence->arrival = ++now_;
  waiting_.emplace(sequence->arrival, sequence);
  ChangeLine(*sequence, [&](Line& line) { line.waiting.emplace(sequence->arrival, sequence); });
}

Sequence* WaitingQueue::Next() const {
  if (waiting_.empty()) return nullptr;
  if (!overdue_.empty()) return overdue_.begin()->second;
  return passed_over_ < kMaxPassedOver ? NextInTurn() : waiting_.begin()->second;
}

Sequence* WaitingQueue::Take() {
  Sequence* const next = Next();
  if (overdue_.erase(next->arrival) == 0) {
    if (next->prompt->request.priority < NextInTurn()->prompt->request.priority) {
      next->overdue = true;
    }
    passed_over_ = next == waiting_.begin()->second ? 0 : passed_over_ + 1;
  }
  if (!std::exchange(next->begun, true)) ++next->prompt->samples_begun;
  next->waits = false;
  waiting_.erase(next->arrival);
  ChangeLine(*next, [&](Line& line) {
    line.waiting.erase(next->arrival);
    ++line.running;
    line.last_turn = ++now_;
  });
  return next;
}

void WaitingQueue::Return(Sequence* sequence) {
  sequence->waits = true;
  waiting_.emplace(sequence->arrival, sequence);
  ChangeLine(*sequence, [&](Line& line) {
    --line.running;
    (sequence->overdue ? overdue_ : line.waiting).emplace(sequence->arrival, sequence);
  });
}

void WaitingQueue::Remove(Sequence* sequence) {
  sequence->waits = false;
  waiting_.erase(sequence->arrival);
  overdue_.erase(sequence->arrival);
  ChangeLine(*sequence, [&](Line& line) { line.waiting.erase(sequence->arrival); });
  if (waiting_.empty()) passed_over_ = 0;
}

void WaitingQueue::End(const Sequence& sequence) {
  ChangeLine(sequence, [](Line& line) { --line.running; });
}

}  // namespace tandem::rollout
