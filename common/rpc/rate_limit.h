// A token bucket: bounds events to a burst and a number per second.
#ifndef TANDEM_COMMON_RPC_RATE_LIMIT_H_
#define TANDEM_COMMON_RPC_RATE_LIMIT_H_

#include <algorithm>

#include "absl/time/time.h"
#include "common/base/steady_time.h"

namespace tandem::rpc {

// Not thread-safe.
class RateLimit {
 public:
  // The bucket is full at `now`.
  RateLimit(double burst, double per_second, SteadyTime now)
      : burst_(burst), per_second_(per_second), tokens_(burst), updated_(now) {}

  // Takes one token for each of `count` events, more than there are if need be; at most a full
  // bucket is owed. Returns whether there were enough.
  bool Take(double count, SteadyTime now) {
    Refill(now);
    tokens_ = std::max(tokens_ - count, -burst_);
    return tokens_ >= 0;
  }
  // Whether events are owed at `now`.
  bool overdrawn(SteadyTime now) {
    Refill(now);
    return tokens_ < 0;
  }

 private:
  void Refill(SteadyTime now) {
    tokens_ = std::min(
        burst_, tokens_ + std::max(0.0, absl::ToDoubleSeconds(now - updated_)) * per_second_);
    updated_ = now;
  }

  const double burst_;
  const double per_second_;
  double tokens_;
  SteadyTime updated_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_RATE_LIMIT_H_
