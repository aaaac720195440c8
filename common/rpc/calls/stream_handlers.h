// Reactors for two kinds of streams: client streams that are collected and answered, and streams
// that map request i to response i.
#ifndef TANDEM_COMMON_RPC_CALLS_STREAM_HANDLERS_H_
#define TANDEM_COMMON_RPC_CALLS_STREAM_HANDLERS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/call_executor.h"
#include "common/rpc/calls/open_streams.h"
#include "common/rpc/calls/reactor_call.h"
#include "common/rpc/calls/stream_message.h"
#include "common/rpc/calls/write_queue.h"

namespace tandem::rpc {

// ---------------------------------------------------------------------------------------------
// Client streams (TrainStep, UploadWeights).

// One object per call.
template <typename Request, typename Response>
class ClientStreamHandler {
 public:
  virtual ~ClientStreamHandler() = default;
  // The bytes of the message that OnMessage gets next, as they were received.
  virtual void OnBytes(const grpc::ByteBuffer&) {}
  // One message, on a gRPC thread: check and keep it, nothing slow. An error ends the call. The
  // next message is read when this returns, so what is not kept is not held.
  virtual absl::Status OnMessage(const Request& request) = 0;
  // After the client's half-close, on the executor; may block.
  virtual absl::StatusOr<Response> OnEnd(const CallScope& context) = 0;
};

namespace internal {

template <typename Request, typename Response>
class ClientStreamCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  ClientStreamCall(CallExecutor& executor, grpc::CallbackServerContext* context,
                   grpc::ByteBuffer* response,
                   std::unique_ptr<ClientStreamHandler<Request, Response>> handler)
      : executor_(executor),
        response_(response),
        handler_(std::move(handler)),
        call_(
            executor, context, RoleFor<Request>(),
            [this](grpc::Status status) { this->Finish(std::move(status)); }, true) {
    if (!call_.Begin()) return;
    this->StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    const auto state = call_.state();
    if (!ok) {
      // The client's half-close, or the end of a call that is broken, such as by a message above
      // the limit: only a whole one can still carry headers.
      state->Start([this] { this->StartSendInitialMetadata(); });
      return;
    }
    if (state->finished()) return;
    const ScopedCallLog call_log(call_.context());
    handler_->OnBytes(bytes_);
    const absl::Status status =
        UseMessage<Request>(num_messages_++, bytes_, [this](const Request& request) {
          return CatchExceptions("handler", [&] { return handler_->OnMessage(request); });
        });
    if (!status.ok()) {
      state->Finish(status);
      return;
    }
    state->Start([this] { this->StartRead(&bytes_); });
  }
  void OnSendInitialMetadataDone(bool ok) override {
    if (!ok) return;  // OnCancel ends it
    const auto state = call_.state();
    absl::Status queued =
        executor_.Run([state, handler = handler_, response = response_, context = call_.context()] {
          if (state->finished()) return;
          const ScopedCallLog call_log(context);
          const absl::StatusOr<Response> result =
              CatchExceptions("handler", [&] { return handler->OnEnd(context); });
          state->Finish(result.status(), [&] {
            if (result.ok()) *response = SerializeMessage(*result);
          });
        });
    if (!queued.ok()) state->Finish(queued);
  }
  void OnCancel() override { call_.OnCancel(); }
  void OnDone() override { delete this; }

 private:
  CallExecutor& executor_;
  grpc::ByteBuffer* const response_;
  const std::shared_ptr<ClientStreamHandler<Request, Response>> handler_;
  grpc::ByteBuffer bytes_;
  int64_t num_messages_ = 0;
  Call call_;
};

}  // namespace internal

// For a method that is marked WithRawCallbackMethod_.
template <typename Request, typename Response>
grpc::ServerReadReactor<grpc::ByteBuffer>* HandleClientStream(
    CallExecutor& executor, grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
    std::unique_ptr<ClientStreamHandler<Request, Response>> handler) {
  return new internal::ClientStreamCall<Request, Response>(executor, context, response,
                                                           std::move(handler));
}

// ---------------------------------------------------------------------------------------------
// Streams that map (ComputeLogProbs, ComputeValues).

template <typename Request, typename Response>
using MapHandler =
    std::function<absl::StatusOr<Response>(const Request& request, const CallScope& context)>;

// Answers the requests of a stream in batches: those that have come while the batch before was
// worked on. One object per call, used on the executor, by one thread at a time.
template <typename Request, typename Response>
class BatchHandler {
 public:
  virtual ~BatchHandler() = default;
  // Most requests that wait.
  virtual size_t max_waiting() const = 0;
  // Takes the next request of the batch; false where the batch takes no more. An error ends the
  // stream, behind the answers to the requests before it.
  virtual absl::StatusOr<bool> Add(const Request& request, const CallScope& context) = 0;
  // Gives the answers to the requests of the batch to `push`, in order, and begins a new one. An
  // error ends the stream, behind the answers that were given.
  virtual absl::Status Answer(const CallScope& context,
                              absl::FunctionRef<void(const Response&)> push) = 0;
};

namespace internal {

// Answers one request at a time.
template <typename Request, typename Response>
class OneByOne final : public BatchHandler<Request, Response> {
 public:
  explicit OneByOne(MapHandler<Request, Response> handler) : handler_(std::move(handler)) {}
  size_t max_waiting() const override { return 16; }
  absl::StatusOr<bool> Add(const Request& request, const CallScope& context) override {
    TANDEM_ASSIGN_OR_RETURN(response_, handler_(request, context));
    return false;
  }
  absl::Status Answer(const CallScope&, absl::FunctionRef<void(const Response&)> push) override {
    push(response_);
    return absl::OkStatus();
  }

 private:
  const MapHandler<Request, Response> handler_;
  Response response_;
};

// At most BatchHandler::max_waiting requests wait to be handled, and as many responses to be
// written; beyond that nothing is read, and HTTP/2 flow control holds the client back.
template <typename Request, typename Response>
class MapStreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Bounds for requests, and for responses: of the next batch, which begins when fewer are left.
  static constexpr size_t kMaxBuffered = 16;
  static constexpr int64_t kMaxBufferedBytes = 8 << 20;

  MapStreamCall(CallExecutor& executor, grpc::CallbackServerContext* context,
                std::unique_ptr<BatchHandler<Request, Response>> handler)
      : executor_(executor),
        handler_(std::move(handler)),
        request_bytes_(executor.streams().held_bytes()),
        writes_([this](const grpc::ByteBuffer* response) { this->StartWrite(response); },
                [this](grpc::Status status) { FinishCall(std::move(status)); },
                executor.streams().held_bytes()),
        call_(
            executor, context, RoleFor<Request>(),
            [this](grpc::Status status) { writes_.FinishNow(std::move(status)); }, false) {
    if (!call_.Begin()) return;
    absl::StatusOr<OpenStreams::Place> place = executor.streams().Enter(
        {.waits_since = [this] { return writes_.waits_since(); },
         .give_up = [context] { context->TryCancel(); },
         .unused = [this] { return !received_; },
         .admitted = [&executor,
                      context] { return executor.StillAllows(*context, RoleFor<Request>()); }});
    if (!place.ok()) {
      call_.state()->Finish(place.status());
      return;
    }
    place_ = *std::move(place);
    reading_ = true;
    this->StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    received_ = true;
    absl::Status held;
    {
      std::lock_guard lock(mutex_);
      reading_ = false;
      if (ok) {
        held = request_bytes_.Take(HeldBytes(incoming_));
        if (held.ok()) requests_.push_back(std::move(incoming_));
        incoming_.Clear();
      } else {
        half_closed_ = true;
      }
    }
    if (!held.ok()) {
      call_.state()->Finish(held);
      return;
    }
    Advance();
  }
  void OnWriteDone(bool ok) override {
    writes_.OnWriteDone(ok);
    Advance();
  }
  void OnCancel() override { call_.OnCancel(); }
  void OnDone() override {
    place_.reset();
    Release();
  }

 private:
  // Starts what can be started: the next read, the next handler, the end. Called from reactions and
  // from the worker, which holds this object (but not gRPC's call: see FinishCall).
  void Advance() {
    bool run = false, end = false;
    {
      std::lock_guard lock(mutex_);
      if (finish_called_ || writes_.ended()) return;
      if (!reading_ && !half_closed_ && requests_.size() < handler_->max_waiting() &&
          request_bytes_.held_bytes() < kMaxBufferedBytes) {
        reading_ = true;
        this->StartRead(&incoming_);  // under the lock, so that Finish comes before or after
      }
      if (!busy_ && !requests_.empty() && writes_.size() < kMaxBuffered &&
          writes_.held_bytes() < kMaxBufferedBytes) {
        run = busy_ = true;
      }
      end = half_closed_ && !busy_ && requests_.empty();
    }
    if (run) {
      ++holders_;
      if (absl::Status queued = executor_.Run([this] { Work(); }); !queued.ok()) {
        call_.state()->Finish(queued);
        Release();
      }
      return;  // the worker may have been the last holder
    }
    if (end) writes_.Finish(grpc::Status::OK);
  }

  // After Finish the call may be gone at any moment, and nothing may be started on it.
  void FinishCall(grpc::Status status) {
    {
      std::lock_guard lock(mutex_);
      finish_called_ = true;
    }
    this->Finish(std::move(status));
  }

  void Release() {
    if (--holders_ == 0) delete this;
  }

  void Work() {
    const auto state = call_.state();
    if (!call_.context().cancelled() && !state->finished()) {
      const ScopedCallLog call_log(call_.context());
      bool added = false;
      absl::Status status = AddRequests(added);
      Advance();  // further requests come while these are answered
      if (added) {
        // Its error is of an earlier request.
        const absl::Status answered = CatchExceptions("handler", [&] {
          return handler_->Answer(call_.context(), [this](const Response& response) {
            writes_.Push(SerializeMessage(response));
          });
        });
        if (!answered.ok()) status = answered;
      }
      if (!status.ok()) state->Finish(status);
    }
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
    }
    Advance();
    Release();
  }

  // Adds the requests that wait to the batch, as long as it takes them. `added`: whether it has
  // any.
  absl::Status AddRequests(bool& added) {
    for (bool more = true; more;) {
      grpc::ByteBuffer bytes;
      {
        std::lock_guard lock(mutex_);
        if (requests_.empty()) break;
        bytes.Swap(&requests_.front());
        requests_.pop_front();
        request_bytes_.Give(HeldBytes(bytes));
      }
      TANDEM_RETURN_IF_ERROR(
          UseMessage<Request>(num_handled_++, bytes, [&](const Request& request) {
            return CatchExceptions("handler", [&]() -> absl::Status {
              TANDEM_ASSIGN_OR_RETURN(more, handler_->Add(request, call_.context()));
              added = true;
              return absl::OkStatus();
            });
          }));
    }
    return absl::OkStatus();
  }

  CallExecutor& executor_;
  const std::unique_ptr<BatchHandler<Request, Response>> handler_;
  OpenStreams::Place place_;
  grpc::ByteBuffer incoming_;
  int64_t num_handled_ = 0;  // used by the worker alone
  std::mutex mutex_;
  std::deque<grpc::ByteBuffer> requests_;
  ByteBudget::Share request_bytes_;
  std::atomic<bool> received_ = false;  // a message, or the half-close
  bool reading_ = false;
  bool half_closed_ = false;
  bool busy_ = false;  // a request is with the executor
  bool finish_called_ = false;
  std::atomic<int> holders_ = 1;  // gRPC, and the worker while it has a request
  WriteQueue<grpc::ByteBuffer> writes_;
  Call call_;
};

}  // namespace internal

// Answers request i with response i. For a method that is marked WithRawCallbackMethod_.
template <typename Request, typename Response>
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* HandleBatchStream(
    CallExecutor& executor, grpc::CallbackServerContext* context,
    std::unique_ptr<BatchHandler<Request, Response>> handler) {
  return new internal::MapStreamCall<Request, Response>(executor, context, std::move(handler));
}

// Answers request i with `handler`'s result as response i, one request at a time on the executor.
// An error ends the stream. For a method that is marked WithRawCallbackMethod_.
template <typename Request, typename Response>
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* HandleMapStream(
    CallExecutor& executor, grpc::CallbackServerContext* context,
    MapHandler<Request, Response> handler) {
  return HandleBatchStream<Request, Response>(
      executor, context,
      std::make_unique<internal::OneByOne<Request, Response>>(std::move(handler)));
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_STREAM_HANDLERS_H_
