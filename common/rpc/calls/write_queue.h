// The outgoing side of a stream: one write in flight, the rest waits here.
#ifndef TANDEM_COMMON_RPC_CALLS_WRITE_QUEUE_H_
#define TANDEM_COMMON_RPC_CALLS_WRITE_QUEUE_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/byte_budget.h"
#include "common/rpc/calls/error_table.h"

namespace tandem::rpc {

inline int64_t HeldBytes(const google::protobuf::Message& message) {
  return static_cast<int64_t>(message.SpaceUsedLong());
}
inline int64_t HeldBytes(const grpc::ByteBuffer& message) {
  return static_cast<int64_t>(message.Length());
}

// Thread-safe. The reactor forwards OnWriteDone; `start_write` and `finish` are its StartWrite and
// Finish. `finish` is called exactly once, never while a write is in flight. A client that leaves
// more unread than `budget` or kMaxHeldBytes allows loses the stream: it ends with
// RESOURCE_EXHAUSTED, and what waits is dropped.
template <typename Response>
class WriteQueue {
 public:
  // One stream's part of the budget: enough for a large step that is read when it is complete.
  static constexpr int64_t kMaxHeldBytes = 256 << 20;

  using StartWrite = std::function<void(const Response*)>;
  using FinishCall = std::function<void(grpc::Status)>;
  // Tries to put the new message into one of its key that waits; true when it did.
  using Merge = std::function<bool(Response& waiting, const Response& message)>;

  WriteQueue(StartWrite start_write, FinishCall finish, ByteBudget& budget)
      : start_write_(std::move(start_write)), finish_(std::move(finish)), held_(budget) {}

  // False, and the message is dropped, once the stream ends.
  bool Push(Response message) { return Push(std::move(message), "", nullptr); }

  // The same for a message that may join the last one of its key, if that still waits.
  bool Push(Response message, const std::string& key, const Merge& merge) {
    std::unique_lock lock(mutex_);
    if (end_.has_value()) return false;
    const absl::Status held = Hold(std::move(message), key, merge);
    if (!held.ok()) {
      DropWaiting();
      end_ = ToGrpcStatus(held);
    }
    Advance(lock);
    return held.ok();
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
    DropWaiting();
    if (!end_.has_value()) end_ = std::move(status);
    Advance(lock);
  }

  // A failed write means that the client is gone.
  void OnWriteDone(bool ok) {
    std::unique_lock lock(mutex_);
    held_.Give(in_flight_->bytes);
    in_flight_.reset();
    if (!ok) {
      DropWaiting();
      if (!end_.has_value()) {
        end_ = grpc::Status(grpc::StatusCode::CANCELLED, "the client stopped reading");
      }
    }
    Advance(lock);
  }

  // Messages that wait or are being written, and their bytes.
  size_t size() const {
    std::lock_guard lock(mutex_);
    return waiting_.size() + (in_flight_.has_value() ? 1 : 0);
  }
  int64_t held_bytes() const {
    std::lock_guard lock(mutex_);
    return held_.held_bytes();
  }
  // When the write, or the end, began that the client has not taken yet; InfiniteFuture without
  // one.
  SteadyTime waits_since() const {
    std::lock_guard lock(mutex_);
    return in_flight_.has_value() || finished_ ? began_ : SteadyTime::InfiniteFuture();
  }
  bool ended() const {
    std::lock_guard lock(mutex_);
    return end_.has_value();
  }

 private:
  struct Entry {
    Response message;
    int64_t bytes;
    std::string key;  // "": none
  };

  absl::Status Hold(Response&& message, const std::string& key, const Merge& merge) {
    if (const auto found = last_of_.find(key); found != last_of_.end()) {
      Entry& entry = *found->second;
      if (merge(entry.message, message)) {
        const int64_t grown = HeldBytes(entry.message) - entry.bytes;
        entry.bytes += grown;
        return Take(grown);
      }
    }
    const int64_t bytes = HeldBytes(message);
    TANDEM_RETURN_IF_ERROR(Take(bytes));
    waiting_.push_back({std::move(message), bytes, key});
    if (!key.empty()) last_of_[key] = &waiting_.back();
    return absl::OkStatus();
  }

  absl::Status Take(int64_t bytes) {
    if (held_.held_bytes() + bytes > kMaxHeldBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the client leaves more than ", kMaxHeldBytes, " bytes unread"));
    }
    return held_.Take(bytes);
  }

  void DropWaiting() {
    waiting_.clear();
    last_of_.clear();
    held_.Give(held_.held_bytes() - (in_flight_.has_value() ? in_flight_->bytes : 0));
  }

  void Advance(std::unique_lock<std::mutex>& lock) {
    if (in_flight_.has_value()) return;
    if (!waiting_.empty()) {
      if (const auto found = last_of_.find(waiting_.front().key);
          found != last_of_.end() && found->second == &waiting_.front()) {
        last_of_.erase(found);
      }
      in_flight_ = std::move(waiting_.front());
      began_ = SteadyTime::Now();
      waiting_.pop_front();
      const Response* message = &in_flight_->message;
      lock.unlock();
      start_write_(message);
    } else if (end_.has_value() && !finished_) {
      finished_ = true;
      began_ = SteadyTime::Now();
      const grpc::Status status = *end_;
      const FinishCall finish = finish_;  // this object may be gone before finish returns
      lock.unlock();
      finish(status);
    }
  }

  const StartWrite start_write_;
  const FinishCall finish_;
  mutable std::mutex mutex_;
  ByteBudget::Share held_;
  std::deque<Entry> waiting_;  // grows and shrinks at its ends alone: entries stay where they are
  std::unordered_map<std::string, Entry*> last_of_;  // the last waiting entry of each key
  std::optional<Entry> in_flight_;
  SteadyTime began_;  // the last write, or the end
  std::optional<grpc::Status> end_;
  bool finished_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_WRITE_QUEUE_H_
