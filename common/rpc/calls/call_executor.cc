#include "common/rpc/calls/call_executor.h"

#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem::rpc {

CallExecutor::CallExecutor(const CallExecutorOptions& options)
    : options_(options),
      streams_(options.streams),
      request_bytes_(options.max_request_bytes),
      queue_(options.queue_capacity) {
  for (int i = 0; i < options.num_threads; ++i) {
    threads_.emplace_back([this] {
      while (auto work = queue_.Pop()) (*work)();
    });
  }
}

CallExecutor::~CallExecutor() {
  queue_.Close();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status CallExecutor::Admit(const grpc::ServerContextBase& context, Role needed) const {
  if (options_.access != nullptr) {
    TANDEM_RETURN_IF_ERROR(options_.access->Check(context, needed));
  }
  switch (gate_.load()) {
    case Gate::kLoading:
      return WithRetryAfter(
          WithReason(absl::UnavailableError("the server is loading its model"), reason::kLoading),
          1000);
    case Gate::kDraining:
      return WithRetryAfter(
          WithReason(absl::UnavailableError("the server is draining"), reason::kDraining), 1000);
    case Gate::kOpen:
      break;
  }
  return absl::OkStatus();
}

bool CallExecutor::StillAllows(const grpc::ServerContextBase& context, Role needed) const {
  return options_.access == nullptr || options_.access->Check(context, needed).ok();
}

absl::Status CallExecutor::Run(std::function<void()> work) {
  if (queue_.TryPush(std::move(work))) return absl::OkStatus();
  if (queue_.closed()) return absl::UnavailableError("the server is shutting down");
  return WithRetryAfter(
      WithReason(absl::ResourceExhaustedError("too many calls are waiting for a worker"),
                 reason::kQueueFull),
      500);
}

}  // namespace tandem::rpc
