// Bounded retries of a call, under the scope of the call that it is made for. gRPC's own retries
// are off for mutating calls, because they run a step twice when a server dies in mid-call; here
// the caller repeats the *same request id*, and the server answers a repeat from its table.
#ifndef TANDEM_COMMON_RPC_CLIENT_RETRY_H_
#define TANDEM_COMMON_RPC_CLIENT_RETRY_H_

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/errors/error.h"
#include "common/base/steady_time.h"

namespace tandem::rpc {

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

// Sleeps; returns early, with the call's status, when the call is over.
inline absl::Status SleepUnlessOver(const CallScope& call, absl::Duration duration) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  const SteadyTime until = std::min(SteadyTime::Now() + duration, call.deadline);
  never.wait_until(lock, call.cancellation, until.ToChrono(), [] { return false; });
  return call.Check();
}

// Calls `attempt()`, which returns an absl::StatusOr, until it succeeds, fails for good, the call
// is over or the attempts are used up; returns the last result.
template <typename Attempt>
auto CallWithRetry(const RetryOptions& options, const CallScope& call, Attempt&& attempt)
    -> decltype(attempt()) {
  absl::Duration backoff = options.initial_backoff;
  for (int i = 1;; ++i) {
    auto result = attempt();
    if (result.ok() || i >= options.max_attempts || !IsTransient(result.status())) return result;
    const absl::Duration hint =
        absl::Milliseconds(RetryAfterMilliseconds(result.status()).value_or(0));
    if (absl::Status over =
            SleepUnlessOver(call, std::min(std::max(backoff, hint), options.max_backoff));
        !over.ok()) {
      return over;
    }
    backoff *= 2;
  }
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CLIENT_RETRY_H_
