// Runs the blocking part of calls: a small pool of threads with a bounded queue, the gate that
// refuses calls while the server loads or drains, and the bounds of its streams.
#ifndef TANDEM_COMMON_RPC_CALLS_CALL_EXECUTOR_H_
#define TANDEM_COMMON_RPC_CALLS_CALL_EXECUTOR_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/bounded_queue.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/open_streams.h"
#include "common/rpc/security/access_control.h"

namespace tandem::rpc {

struct CallExecutorOptions {
  int num_threads = 4;
  size_t queue_capacity = 256;
  // Bound on the requests, not yet answered, of calls with one request and one answer.
  int64_t max_request_bytes = 256 << 20;
  // The deadline of calls with one answer that come without one.
  absl::Duration default_deadline;
  OpenStreamsOptions streams;
  // Must outlive the executor; null: every caller may do everything.
  const AccessControl* access = nullptr;
};

class CallExecutor {
 public:
  explicit CallExecutor(const CallExecutorOptions& options);
  // Waits for the work that has been accepted.
  ~CallExecutor();
  CallExecutor(const CallExecutor&) = delete;
  CallExecutor& operator=(const CallExecutor&) = delete;

  enum class Gate { kLoading, kOpen, kDraining };
  // Starts as kLoading.
  void SetGate(Gate gate) { gate_ = gate; }

  // The one gate of every call: interceptors cannot refuse one. OK if the caller has the role
  // `needed` and the gate is open. UNAUTHENTICATED or PERMISSION_DENIED if it has not
  // (access_control.h); UNAVAILABLE with reason LOADING or DRAINING and a retry hint if the gate is
  // not open. A handler that got OK may use its engine.
  absl::Status Admit(const grpc::ServerContextBase& context, Role needed) const;

  // Whether the caller still has the role `needed`: tokens are withdrawn while a stream is open.
  bool StillAllows(const grpc::ServerContextBase& context, Role needed) const;

  // Queues `work`. RESOURCE_EXHAUSTED with a retry hint when the queue is full; `work` then never
  // runs.
  absl::Status Run(std::function<void()> work);

  OpenStreams& streams() { return streams_; }
  ByteBudget& request_bytes() { return request_bytes_; }

  absl::Duration default_deadline() const { return options_.default_deadline; }
  size_t queue_size() const { return queue_.size(); }
  size_t queue_capacity() const { return queue_.capacity(); }

 private:
  const CallExecutorOptions options_;
  OpenStreams streams_;
  ByteBudget request_bytes_;
  std::atomic<Gate> gate_ = Gate::kLoading;
  BoundedQueue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_CALL_EXECUTOR_H_
