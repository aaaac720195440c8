// The scope of a call: names, deadline and cancellation, for the work that is done for it.
#ifndef TANDEM_COMMON_BASE_CALL_SCOPE_H_
#define TANDEM_COMMON_BASE_CALL_SCOPE_H_

#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "common/base/steady_time.h"

namespace tandem {

// The default is a call without a name that nobody cancels and that may take for ever.
struct CallScope {
  std::string request_id;
  std::string traceparent = {};  // W3C trace context of the caller, well formed; "" for none
  SteadyTime deadline = SteadyTime::InfiniteFuture();
  std::stop_token cancellation;  // requested once the caller is gone or its time is up

  bool cancelled() const { return cancellation.stop_requested(); }

  // OK while somebody waits for the result: else DEADLINE_EXCEEDED or CANCELLED. Long work asks now
  // and then.
  absl::Status Check() const {
    if (SteadyTime::Now() >= deadline)
      return absl::DeadlineExceededError("the deadline has passed");
    if (cancelled()) return absl::CancelledError("the caller cancelled the call");
    return absl::OkStatus();
  }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_CALL_SCOPE_H_
