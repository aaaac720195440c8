#include "services/rollout/engine/schedule/queue_drain.h"

#include <algorithm>
#include <cmath>

namespace tandem::rollout {
namespace {

// What happened this long ago counts 1/e.
constexpr absl::Duration kMemory = absl::Seconds(30);

}  // namespace

absl::Duration RetryAfter(int64_t places, double ended, absl::Duration measured) {
  const absl::Duration each = measured / std::max(ended, 1.0);
  return std::clamp(each * places, kShortestRetry, kLongestRetry);
}

QueueDrain::Average QueueDrain::After(SteadyTime now, int64_t ended) const {
  if (waiting_ == 0 || now <= last_) return average_;
  const double remembered = std::exp(-absl::FDivDuration(now - last_, kMemory));
  return {.ended = average_.ended * remembered + static_cast<double>(ended),
          .measured = average_.measured * remembered + kMemory * (1 - remembered)};
}

void QueueDrain::Observe(SteadyTime now, int64_t waiting, int64_t ended_total) {
  average_ = After(now, ended_total - ended_total_);
  last_ = now;
  waiting_ = waiting;
  ended_total_ = ended_total;
}

absl::Duration QueueDrain::RetryAfter(SteadyTime now, int64_t places) const {
  const Average average = After(now, 0);
  return rollout::RetryAfter(places, average.ended, average.measured);
}

}  // namespace tandem::rollout
