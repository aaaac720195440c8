// One engine call at a time, and none for a client that has gone.
#ifndef TANDEM_COMMON_RPC_ENGINE_TURN_H_
#define TANDEM_COMMON_RPC_ENGINE_TURN_H_

#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "common/rpc/call_executor.h"

namespace tandem::rpc {

// Engines serialise their methods themselves; waiting here instead lets a call whose client
// cancelled, or whose deadline passed, leave without having begun.
class EngineTurn {
 public:
  // Calls `work()`, which returns an absl::Status or a StatusOr, in this call's turn.
  template <typename Work>
  auto Run(const CallContext& context, Work&& work) -> decltype(work()) {
    std::lock_guard lock(mutex_);
    if (absl::Status gone = context.Check(); !gone.ok()) return gone;
    return work();
  }

 private:
  std::mutex mutex_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_ENGINE_TURN_H_
