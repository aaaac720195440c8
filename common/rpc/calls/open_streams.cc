#include "common/rpc/calls/open_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/logging.h"
#include "common/base/steady_time.h"

namespace tandem::rpc {

OpenStreams::OpenStreams(const OpenStreamsOptions& options)
    : options_(options), held_bytes_(options.max_held_bytes), watcher_([this] { Watch(); }) {}

OpenStreams::~OpenStreams() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  watcher_.join();
}

absl::StatusOr<OpenStreams::Place> OpenStreams::Enter(Stream stream) {
  std::lock_guard lock(mutex_);
  const auto open = std::count_if(entries_.begin(), entries_.end(),
                                  [](const Entry& entry) { return !entry.given_up; });
  if (open >= options_.max_streams) {
    const auto unused = std::find_if(entries_.begin(), entries_.end(), [](const Entry& entry) {
      return !entry.given_up && entry.stream.unused && entry.stream.unused();
    });
    if (unused == entries_.end()) {
      return WithRetryAfter(absl::ResourceExhaustedError(absl::StrCat(
                                "the server has ", options_.max_streams, " open streams already")),
                            1000);
    }
    GiveUp(*unused, "another stream needs its place, and it has sent no message");
  }
  const auto entry = entries_.insert(entries_.end(), {.stream = std::move(stream)});
  return Place(nullptr, [this, entry](void*) {
    std::lock_guard lock(mutex_);
    entries_.erase(entry);
  });
}

void OpenStreams::GiveUp(Entry& entry, absl::string_view reason) {
  entry.given_up = true;
  Log(LogLevel::kWarning, "stream_given_up", {{"message", reason}});
  entry.stream.give_up();
}

void OpenStreams::EndWithdrawn() {
  std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.given_up || !entry.stream.admitted || entry.stream.admitted()) continue;
    GiveUp(entry, "the client's token was revoked");
  }
}

void OpenStreams::Watch() {
  const auto period = absl::ToChronoMilliseconds(std::min(options_.patience / 4, absl::Seconds(1)));
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, period, [this] { return stop_; })) {
    const SteadyTime limit = SteadyTime::Now() - options_.patience;
    for (Entry& entry : entries_) {
      if (entry.given_up || entry.stream.waits_since() > limit) continue;
      GiveUp(entry, absl::StrCat("the client has not read for ",
                                 absl::ToDoubleSeconds(options_.patience), " s"));
    }
  }
}

}  // namespace tandem::rpc
