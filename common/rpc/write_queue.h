// The outgoing side of a stream: one write in flight, the rest waits here.
#ifndef TANDEM_COMMON_RPC_WRITE_QUEUE_H_
#define TANDEM_COMMON_RPC_WRITE_QUEUE_H_

#include <grpcpp/support/status.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

namespace tandem::rpc {

// Thread-safe. The reactor forwards OnWriteDone; `start_write` and `finish` are its StartWrite and
// Finish. `finish` is called exactly once, never while a write is in flight.
template <typename Response>
class WriteQueue {
 public:
  using StartWrite = std::function<void(const Response*)>;
  using FinishCall = std::function<void(grpc::Status)>;
  // Tries to put the new message into one that waits; true when it did.
  using Merge = std::function<bool(std::deque<Response>& waiting, Response& message)>;

  WriteQueue(StartWrite start_write, FinishCall finish)
      : start_write_(std::move(start_write)), finish_(std::move(finish)) {}

  // False, and the message is dropped, once the stream ends.
  bool Push(Response message, const Merge& merge = nullptr) {
    std::unique_lock lock(mutex_);
    if (end_.has_value()) return false;
    if (!(merge && merge(waiting_, message))) waiting_.push_back(std::move(message));
    Advance(lock);
    return true;
  }

  // Ends the stream after the waiting messages are written. The first end counts.
  void Finish(grpc::Status status) {
    std::unique_lock lock(mutex_);
    if (end_.has_value()) return;
    end_ = std::move(status);
    Advance(lock);
  }

  // Ends the stream and drops the waiting messages.
  void FinishNow(grpc::Status status) {
    std::unique_lock lock(mutex_);
    waiting_.clear();
    if (!end_.has_value()) end_ = std::move(status);
    Advance(lock);
  }

  // A failed write means that the client is gone.
  void OnWriteDone(bool ok) {
    std::unique_lock lock(mutex_);
    in_flight_.reset();
    if (!ok) {
      waiting_.clear();
      if (!end_.has_value()) {
        end_ = grpc::Status(grpc::StatusCode::CANCELLED, "the client stopped reading");
      }
    }
    Advance(lock);
  }

  // Messages that wait or are being written.
  size_t size() const {
    std::lock_guard lock(mutex_);
    return waiting_.size() + (in_flight_.has_value() ? 1 : 0);
  }
  bool ended() const {
    std::lock_guard lock(mutex_);
    return end_.has_value();
  }

 private:
  void Advance(std::unique_lock<std::mutex>& lock) {
    if (in_flight_.has_value()) return;
    if (!waiting_.empty()) {
      in_flight_ = std::move(waiting_.front());
      waiting_.pop_front();
      const Response* message = &*in_flight_;
      lock.unlock();
      start_write_(message);
    } else if (end_.has_value() && !finished_) {
      finished_ = true;
      const grpc::Status status = *end_;
      const FinishCall finish = finish_;  // this object may be gone before finish returns
      lock.unlock();
      finish(status);
    }
  }

  const StartWrite start_write_;
  const FinishCall finish_;
  mutable std::mutex mutex_;
  std::deque<Response> waiting_;
  std::optional<Response> in_flight_;
  std::optional<grpc::Status> end_;
  bool finished_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_WRITE_QUEUE_H_
