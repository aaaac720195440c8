// The streams of a server that wait for what a client does: how many there may be, how much they
// may hold together, and for how long a client may leave one of them unread.
#ifndef TANDEM_COMMON_RPC_CALLS_OPEN_STREAMS_H_
#define TANDEM_COMMON_RPC_CALLS_OPEN_STREAMS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/steady_time.h"
#include "common/rpc/calls/byte_budget.h"

namespace tandem::rpc {

struct OpenStreamsOptions {
  int64_t max_streams = 256;
  // Bound on requests that wait to be handled and answers that wait to be read.
  int64_t max_held_bytes = int64_t{1} << 30;
  // How long a client may leave an answer unread.
  absl::Duration patience;
};

// Thread-safe.
class OpenStreams {
 public:
  explicit OpenStreams(const OpenStreamsOptions& options);
  ~OpenStreams();
  OpenStreams(const OpenStreams&) = delete;
  OpenStreams& operator=(const OpenStreams&) = delete;

  struct Stream {
    // Since when an answer waits for the client; InfiniteFuture while none does.
    std::function<SteadyTime()> waits_since;
    // Cancels the call: its client has left an answer unread for too long, or its place is needed.
    std::function<void()> give_up;
    // Whether no message of the client has come yet. Empty for streams that only the server writes.
    std::function<bool()> unused = {};
    // Whether the client may still make the call: its token may have been withdrawn. Empty: it may.
    std::function<bool()> admitted = {};
  };

  // A stream's place among those that are open. Neither function runs after its destruction.
  using Place = std::shared_ptr<void>;

  // Where all places are taken, the oldest unused stream gives its place up; RESOURCE_EXHAUSTED
  // with a retry hint when there is none. The functions are called on other threads and must not
  // wait for one that leaves its place.
  absl::StatusOr<Place> Enter(Stream stream);

  // Ends the streams whose clients may not make the call any more.
  void EndWithdrawn();

  ByteBudget& held_bytes() { return held_bytes_; }

 private:
  struct Entry {
    Stream stream;
    bool given_up = false;
  };

  static void GiveUp(Entry& entry, absl::string_view reason);
  void Watch();

  const OpenStreamsOptions options_;
  ByteBudget held_bytes_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::list<Entry> entries_;
  std::thread watcher_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_OPEN_STREAMS_H_
