// Moments on the clock that nobody sets. Deadlines, waits and limits are such moments: an
// administrator or NTP may set the wall clock (absl::Time) while a call runs. The wall clock is for
// logs, certificates and whatever else a person reads.
#ifndef TANDEM_COMMON_BASE_STEADY_TIME_H_
#define TANDEM_COMMON_BASE_STEADY_TIME_H_

#include <algorithm>
#include <chrono>
#include <compare>

#include "absl/time/time.h"

namespace tandem {

// Arithmetic saturates at the infinite moments, as that of absl::Time does. The default is the
// zero of the clock, which means nothing in particular.
class SteadyTime {
 public:
  using Clock = std::chrono::steady_clock;

  constexpr SteadyTime() = default;
  static SteadyTime Now() { return SteadyTime(absl::FromChrono(Clock::now().time_since_epoch())); }
  static constexpr SteadyTime InfiniteFuture() { return SteadyTime(absl::InfiniteDuration()); }
  static constexpr SteadyTime InfinitePast() { return SteadyTime(-absl::InfiniteDuration()); }

  SteadyTime& operator+=(absl::Duration duration) {
    since_zero_ += duration;
    return *this;
  }
  friend SteadyTime operator+(SteadyTime time, absl::Duration duration) { return time += duration; }
  friend SteadyTime operator-(SteadyTime time, absl::Duration duration) {
    return time += -duration;
  }
  friend absl::Duration operator-(SteadyTime end, SteadyTime begin) {
    return end.since_zero_ - begin.since_zero_;
  }
  friend bool operator==(SteadyTime a, SteadyTime b) { return a.since_zero_ == b.since_zero_; }
  friend std::weak_ordering operator<=>(SteadyTime a, SteadyTime b) {
    if (a.since_zero_ < b.since_zero_) return std::weak_ordering::less;
    return a == b ? std::weak_ordering::equivalent : std::weak_ordering::greater;
  }

  // For waits of the standard library; the infinite future is the last moment that it knows.
  Clock::time_point ToChrono() const {
    return Clock::time_point(
        absl::ToChronoNanoseconds(std::max(since_zero_, absl::ZeroDuration())));
  }

 private:
  constexpr explicit SteadyTime(absl::Duration since_zero) : since_zero_(since_zero) {}

  absl::Duration since_zero_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_STEADY_TIME_H_
