// Bounded retries of a call. gRPC's own retries are off for mutating calls, because they run a step
// twice when a server dies in mid-call; here the caller repeats the *same request id*, and the
// server answers a repeat from its table.
#ifndef TANDEM_CLIENTS_CPP_RETRY_H_
#define TANDEM_CLIENTS_CPP_RETRY_H_

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/error.h"

namespace tandem::client {

struct RetryOptions {
  int max_attempts = 5;
  absl::Duration initial_backoff = absl::Milliseconds(200);  // doubles with every attempt
  absl::Duration max_backoff = absl::Seconds(5);
  // Deadline of one attempt. A step may compute for long; keepalive finds a peer that is gone.
  absl::Duration attempt_timeout = absl::Hours(1);
};

// A failure that may pass by itself: UNAVAILABLE, or RESOURCE_EXHAUSTED with a retry hint.
inline bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         (absl::IsResourceExhausted(status) && RetryAfterMilliseconds(status).has_value());
}

// Calls `attempt()`, which returns an absl::StatusOr, until it succeeds, fails for good or the
// attempts are used up; returns the last result.
template <typename Attempt>
auto CallWithRetry(const RetryOptions& options, Attempt&& attempt) -> decltype(attempt()) {
  absl::Duration backoff = options.initial_backoff;
  for (int i = 1;; ++i) {
    auto result = attempt();
    if (result.ok() || i >= options.max_attempts || !IsTransient(result.status())) return result;
    const absl::Duration hint =
        absl::Milliseconds(RetryAfterMilliseconds(result.status()).value_or(0));
    absl::SleepFor(std::min(std::max(backoff, hint), options.max_backoff));
    backoff *= 2;
  }
}

}  // namespace tandem::client

#endif  // TANDEM_CLIENTS_CPP_RETRY_H_
