// The one way to answer a unary call: gate, bounds, queue, deadline, cancellation, errors. The
// method is marked WithRawCallbackMethod_, so that its request is parsed here, on a worker.
//
//   grpc::ServerUnaryReactor* Pause(grpc::CallbackServerContext* context,
//                                   const grpc::ByteBuffer* request,
//                                   grpc::ByteBuffer* response) override {
//     return rpc::HandleUnary<PauseRequest, PauseResponse>(
//         executor_, context, request, response,
//         [this](const PauseRequest&, const CallScope&) -> absl::StatusOr<PauseResponse> {…});
//   }
#ifndef TANDEM_COMMON_RPC_CALLS_UNARY_HANDLER_H_
#define TANDEM_COMMON_RPC_CALLS_UNARY_HANDLER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/calls/reactor_call.h"
#include "common/rpc/calls/stream_message.h"

namespace tandem::rpc {

template <typename Request, typename Response>
using UnaryHandler =
    std::function<absl::StatusOr<Response>(const Request& request, const CallScope& context)>;

// Starts to answer: an error ends the call; after OK `done` is called, once and from any thread.
template <typename Request, typename Response>
using AsyncUnaryHandler =
    std::function<absl::Status(const Request& request, const CallScope& context,
                               std::function<void(absl::StatusOr<Response> result)> done)>;

namespace internal {

template <typename Request, typename Response>
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(CallExecutor& executor, grpc::CallbackServerContext* context,
            const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
            AsyncUnaryHandler<Request, Response> handler)
      : held_(std::make_shared<ByteBudget::Share>(executor.request_bytes())),
        call_(
            executor, context, RoleFor<Request>(),
            [this](grpc::Status status) { Finish(std::move(status)); }, true) {
    if (!call_.Begin()) return;
    const auto state = call_.state();
    if (absl::Status taken = held_->Take(static_cast<int64_t>(request->Length())); !taken.ok()) {
      state->Finish(taken);
      return;
    }
    // The worker owns copies: the call may be over before it runs.
    absl::Status queued =
        executor.Run([state, response, bytes = *request, held = held_, context = call_.context(),
                      handler = std::move(handler)]() mutable {
          if (state->finished()) return;
          const ScopedCallLog call_log(context);
          const auto done = [state, response](const absl::StatusOr<Response>& result) {
            state->Finish(result.status(), [&] {
              if (result.ok()) *response = SerializeMessage(*result);
            });
          };
          const absl::Status started = UseMessage<Request>(bytes, [&](const Request& request) {
            return CatchExceptions("handler", [&] { return handler(request, context, done); });
          });
          if (!started.ok()) state->Finish(started);
        });
    if (!queued.ok()) state->Finish(queued);
  }

  void OnCancel() override { call_.OnCancel(); }
  void OnDone() override { delete this; }

 private:
  const std::shared_ptr<ByteBudget::Share> held_;  // the request, which gRPC keeps as well
  Call call_;
};

}  // namespace internal

// Runs `handler` on the executor, which is free again when it returns. The answer comes at the
// deadline at the latest; a result that is later is dropped.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* HandleUnaryAsync(CallExecutor& executor,
                                           grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response,
                                           AsyncUnaryHandler<Request, Response> handler) {
  return new internal::UnaryCall<Request, Response>(executor, context, request, response,
                                                    std::move(handler));
}

// The same for a handler that returns the result.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* HandleUnary(CallExecutor& executor, grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                      UnaryHandler<Request, Response> handler) {
  return HandleUnaryAsync<Request, Response>(
      executor, context, request, response,
      [handler = std::move(handler)](const Request& request, const CallScope& context,
                                     const auto& done) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(Response result, handler(request, context));
        done(std::move(result));
        return absl::OkStatus();
      });
}

// Runs `handler` on the gRPC thread, for answers that are at hand: a status is told while every
// worker waits for a busy engine.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* AnswerAtOnce(
    CallExecutor& executor, grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response,
    absl::FunctionRef<absl::StatusOr<Response>(const Request& request)> handler) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::Status status = executor.Admit(*context, RoleFor<Request>());
  if (status.ok()) {
    grpc::ByteBuffer bytes = *request;
    status = UseMessage<Request>(bytes, [&](const Request& message) -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(const Response result,
                              CatchExceptions("handler", [&] { return handler(message); }));
      *response = SerializeMessage(result);
      return absl::OkStatus();
    });
  }
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_UNARY_HANDLER_H_
