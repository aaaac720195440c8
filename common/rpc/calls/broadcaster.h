// Streams that only the server writes, the same messages on all of them (WatchSteps).
#ifndef TANDEM_COMMON_RPC_CALLS_BROADCASTER_H_
#define TANDEM_COMMON_RPC_CALLS_BROADCASTER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/calls/open_streams.h"
#include "common/rpc/calls/stream_message.h"
#include "common/rpc/calls/write_queue.h"

namespace tandem::rpc {

// Thread-safe. Must outlive the calls. A reader with `capacity` unread messages is ended with
// RESOURCE_EXHAUSTED rather than skipped, so that it knows that it missed messages, and can come
// again.
template <typename Request, typename Response>
class Broadcaster {
 public:
  explicit Broadcaster(size_t capacity) : capacity_(capacity) {}

  // Opens a stream, unless the server refuses the call. The request has no fields: it is checked
  // and not used. For a method that is marked WithRawCallbackMethod_.
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Add(CallExecutor& executor,
                                                  grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request) {
    return new Reader(*this, executor, context, request);
  }

  void Publish(const Response& message) {
    const grpc::ByteBuffer bytes = SerializeMessage(message);
    const std::lock_guard lock(mutex_);
    for (Reader* const reader : readers_) reader->Push(bytes);
  }

  // Ends every stream, after its waiting messages, and at once those that are opened later.
  void Close(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    closed_ = ToGrpcStatus(status);
    for (Reader* const reader : readers_) reader->End(*closed_);
  }

  size_t num_readers() const {
    const std::lock_guard lock(mutex_);
    return readers_.size();
  }

 private:
  class Reader final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
   public:
    Reader(Broadcaster& broadcaster, CallExecutor& executor, grpc::CallbackServerContext* context,
           const grpc::ByteBuffer* request)
        : broadcaster_(broadcaster),
          request_bytes_(executor.streams().held_bytes()),
          writes_([this](const grpc::ByteBuffer* message) { this->StartWrite(message); },
                  [this](grpc::Status status) { this->Finish(std::move(status)); },
                  executor.streams().held_bytes()) {
      const absl::Status status = Open(executor, context, *request);
      if (!status.ok()) {
        End(ToGrpcStatus(status));
        return;
      }
      const std::lock_guard lock(broadcaster_.mutex_);
      if (broadcaster_.closed_.has_value()) {
        End(*broadcaster_.closed_);
      } else {
        broadcaster_.readers_.insert(this);
      }
    }

    void Push(const grpc::ByteBuffer& message) {
      if (writes_.size() < broadcaster_.capacity_) {
        writes_.Push(message);
      } else {
        writes_.FinishNow(ToGrpcStatus(absl::ResourceExhaustedError("the reader is too slow")));
      }
    }
    void End(const grpc::Status& status) { writes_.Finish(status); }

    void OnWriteDone(bool ok) override { writes_.OnWriteDone(ok); }
    void OnCancel() override {
      writes_.FinishNow(grpc::Status(grpc::StatusCode::CANCELLED, "the client cancelled the call"));
    }
    void OnDone() override {
      place_.reset();
      {
        const std::lock_guard lock(broadcaster_.mutex_);
        broadcaster_.readers_.erase(this);
      }
      delete this;
    }

   private:
    absl::Status Open(CallExecutor& executor, grpc::CallbackServerContext* context,
                      grpc::ByteBuffer request) {
      TANDEM_RETURN_IF_ERROR(executor.Admit(*context, RoleFor<Request>()));
      TANDEM_ASSIGN_OR_RETURN(
          place_, executor.streams().Enter({.waits_since = [this] { return writes_.waits_since(); },
                                            .give_up = [context] { context->TryCancel(); },
                                            .admitted =
                                                [&executor, context] {
                                                  return executor.StillAllows(*context,
                                                                              RoleFor<Request>());
                                                }}));
      TANDEM_RETURN_IF_ERROR(request_bytes_.Take(HeldBytes(request)));
      return UseMessage<Request>(request, [](const Request&) { return absl::OkStatus(); });
    }

    Broadcaster& broadcaster_;
    OpenStreams::Place place_;
    ByteBudget::Share request_bytes_;  // of the request, which gRPC keeps
    WriteQueue<grpc::ByteBuffer> writes_;
  };

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::set<Reader*> readers_;
  std::optional<grpc::Status> closed_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_BROADCASTER_H_
