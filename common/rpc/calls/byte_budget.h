// A budget of bytes that calls in progress hold together.
#ifndef TANDEM_COMMON_RPC_CALLS_BYTE_BUDGET_H_
#define TANDEM_COMMON_RPC_CALLS_BYTE_BUDGET_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem::rpc {

// Thread-safe.
class ByteBudget {
 public:
  explicit ByteBudget(int64_t capacity_bytes) : capacity_(capacity_bytes) {}

  int64_t used_bytes() const { return used_; }

  // The bytes that one holder has taken. Used by one thread at a time; the destructor gives them
  // back.
  class Share {
   public:
    explicit Share(ByteBudget& budget) : budget_(budget) {}
    ~Share() { budget_.used_ -= held_; }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    int64_t held_bytes() const { return held_; }

    // RESOURCE_EXHAUSTED when all holders together would exceed the capacity, with a retry hint
    // unless this one alone would.
    absl::Status Take(int64_t bytes) {
      if (budget_.used_.fetch_add(bytes) + bytes <= budget_.capacity_) {
        held_ += bytes;
        return absl::OkStatus();
      }
      budget_.used_ -= bytes;
      absl::Status full = absl::ResourceExhaustedError(
          absl::StrCat("calls in progress may hold ", budget_.capacity_, " bytes in total"));
      return held_ + bytes > budget_.capacity_ ? full : WithRetryAfter(full, 1000);
    }

    // Gives back what was taken.
    void Give(int64_t bytes) {
      budget_.used_ -= bytes;
      held_ -= bytes;
    }

   private:
    ByteBudget& budget_;
    int64_t held_ = 0;
  };

 private:
  const int64_t capacity_;
  std::atomic<int64_t> used_ = 0;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_BYTE_BUDGET_H_
