// Measures how fast a queue drains, for the retry hints of callers whom it refuses.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_QUEUE_DRAIN_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_QUEUE_DRAIN_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem::rollout {

inline constexpr absl::Duration kShortestRetry = absl::Milliseconds(100);
inline constexpr absl::Duration kLongestRetry = absl::Seconds(30);

// Returns the time in which `places` places of a queue become free, if `ended` sequences ended in
// the last `measured` time; between kShortestRetry and kLongestRetry. While none has ended, the
// next one is expected to take as long as `measured`.
absl::Duration RetryAfter(int64_t places, double ended, absl::Duration measured);

// A moving average over the last half minute. Time without waiting sequences does not count: an
// idle engine is not a slow one.
class QueueDrain {
 public:
  // Tells that `waiting` sequences wait at `now`, and that `ended_total` have ended since the
  // start.
  void Observe(SteadyTime now, int64_t waiting, int64_t ended_total);

  // Returns in which time `places` places are likely to be free.
  absl::Duration RetryAfter(SteadyTime now, int64_t places) const;

 private:
  struct Average {
    double ended = 0;
    absl::Duration measured = absl::ZeroDuration();
  };
  // Returns the average at `now`, after `ended` more sequences have ended.
  Average After(SteadyTime now, int64_t ended) const;

  Average average_;
  SteadyTime last_ = SteadyTime::InfinitePast();
  int64_t waiting_ = 0;
  int64_t ended_total_ = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_QUEUE_DRAIN_H_
