// The state that the reactors of unary_handler.h and stream_handlers.h have in common: a call is
// finished once, by the handler, a cancellation or the deadline, whichever comes first.
#ifndef TANDEM_COMMON_RPC_CALLS_REACTOR_CALL_H_
#define TANDEM_COMMON_RPC_CALLS_REACTOR_CALL_H_

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/base/call_scope.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/grpc_time.h"
#include "common/rpc/request_id.h"

namespace tandem::rpc::internal {

// Outlives the reactor: workers hold it, and find out here that nobody waits any more.
class CallState {
 public:
  explicit CallState(std::function<void(grpc::Status)> finish) : finish_(std::move(finish)) {}

  // `before` runs first, and only if this is the finish that counts.
  bool Finish(const absl::Status& status, const std::function<void()>& before = nullptr) {
    std::function<void(grpc::Status)> finish;
    {
      std::lock_guard lock(mutex_);
      if (finished_) return false;
      finished_ = true;
      finish = std::move(finish_);
      if (before) before();
    }
    finish(ToGrpcStatus(status));
    return true;
  }
  // Starts an operation of the reactor, unless the call is finished; a Finish comes after it.
  void Start(absl::FunctionRef<void()> operation) {
    std::lock_guard lock(mutex_);
    if (!finished_) operation();
  }
  void Cancel() { cancellation_.request_stop(); }
  std::stop_token cancellation() const { return cancellation_.get_token(); }
  bool finished() const {
    std::lock_guard lock(mutex_);
    return finished_;
  }

 private:
  std::stop_source cancellation_;
  mutable std::mutex mutex_;
  bool finished_ = false;
  std::function<void(grpc::Status)> finish_;
};

// One call: the gate, its state, its context, and the default deadline where the client gave none.
class Call {
 public:
  Call(const CallExecutor& executor, grpc::CallbackServerContext* context, Role needed,
       std::function<void(grpc::Status)> finish, bool needs_deadline)
      : state_(std::make_shared<CallState>(std::move(finish))),
        admitted_(executor.Admit(*context, needed)) {
    context_.request_id = AssignRequestId(context);
    context_.traceparent = TraceparentOf(*context);
    context_.deadline = FromGrpcTime(context->raw_deadline());
    context_.cancellation = state_->cancellation();
    if (needs_deadline && context_.deadline == SteadyTime::InfiniteFuture()) {
      context_.deadline = SteadyTime::Now() + executor.default_deadline();
      alarm_.Set(ToGrpcTime(context_.deadline), [state = state_](bool fired) {
        if (!fired) return;
        state->Cancel();
        state->Finish(absl::DeadlineExceededError("the server's default deadline has passed"));
      });
    }
  }

  // Must be called first in a reactor. Returns false if the gate refused the call, which is then
  // finished.
  bool Begin() {
    if (!admitted_.ok()) state_->Finish(admitted_);
    return admitted_.ok();
  }

  void OnCancel() {
    state_->Cancel();
    state_->Finish(context_.Check());
  }

  const std::shared_ptr<CallState>& state() const { return state_; }
  const CallScope& context() const { return context_; }

 private:
  std::shared_ptr<CallState> state_;
  const absl::Status admitted_;
  CallScope context_;
  grpc::Alarm alarm_;
};

}  // namespace tandem::rpc::internal

#endif  // TANDEM_COMMON_RPC_CALLS_REACTOR_CALL_H_
