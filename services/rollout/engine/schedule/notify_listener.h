// Calls of listeners whose work has failed.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_NOTIFY_LISTENER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_NOTIFY_LISTENER_H_

#include "absl/functional/function_ref.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/logging.h"

namespace tandem::rollout {

// Calls `notify` and logs what it throws, so that the other listeners are still called.
inline void NotifyListener(absl::FunctionRef<void()> notify) {
  const absl::Status told = CatchExceptions("a listener", [&] {
    notify();
    return absl::OkStatus();
  });
  if (!told.ok()) Log(LogLevel::kError, "listener_failed", {{"error", told.ToString()}});
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SCHEDULE_NOTIFY_LISTENER_H_
