// Time as a dependency, so that deadlines can be tested without waiting.
#ifndef TANDEM_COMMON_BASE_CLOCK_H_
#define TANDEM_COMMON_BASE_CLOCK_H_

#include <mutex>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem {

class Clock {
 public:
  virtual ~Clock() = default;
  // Thread safe.
  virtual absl::Time Now() const = 0;

  // The machine's clock; never destroyed.
  static const Clock* Real();
};

// A clock that stands still until it is told to move.
class FakeClock : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() const override {
    std::lock_guard lock(mutex_);
    return now_;
  }
  void Advance(absl::Duration step) {
    std::lock_guard lock(mutex_);
    now_ += step;
  }

 private:
  mutable std::mutex mutex_;
  absl::Time now_;
};

inline const Clock* Clock::Real() {
  class RealClock : public Clock {
    absl::Time Now() const override { return absl::Now(); }
  };
  static const RealClock* const clock = new RealClock;
  return clock;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_CLOCK_H_
