// Telling several listeners that their work has failed.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TELL_LISTENER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TELL_LISTENER_H_

#include "absl/functional/function_ref.h"
#include "common/base/catch_exceptions.h"
#include "common/base/logging.h"

namespace tandem::rollout {

// Logs what `tell` throws, which must not keep the other listeners from hearing.
inline void TellListener(absl::FunctionRef<void()> tell) {
  const absl::Status told = CatchExceptions("a listener", [&] {
    tell();
    return absl::OkStatus();
  });
  if (!told.ok()) Log(LogLevel::kError, "listener_failed", {{"error", told.ToString()}});
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TELL_LISTENER_H_
