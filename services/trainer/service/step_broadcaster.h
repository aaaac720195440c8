// Sends step reports to any number of watchers.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_STEP_BROADCASTER_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_STEP_BROADCASTER_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/rpc/calls/stream_handlers.h"
#include "tandem/trainer/v1/trainer.pb.h"

namespace tandem::trainer {

// Thread-safe. A watcher with kQueueCapacity unread reports is ended with RESOURCE_EXHAUSTED rather
// than skipped, so that it knows that it missed reports, and can watch again.
class StepBroadcaster {
 public:
  using Writer = rpc::StreamWriter<v1::WatchStepsResponse>;
  static constexpr size_t kQueueCapacity = 256;

  // Adds a watcher. After Close it is ended at once.
  void Add(std::shared_ptr<Writer> watcher) {
    {
      std::lock_guard lock(mutex_);
      std::erase_if(watchers_, [](const auto& old) { return old->closed(); });
      if (!closed_) {
        watchers_.push_back(std::move(watcher));
        return;
      }
    }
    watcher->Close(Ended());
  }

  void Publish(const v1::WatchStepsResponse& report) {
    std::lock_guard lock(mutex_);
    std::erase_if(watchers_, [&](const auto& watcher) { return !watcher->Push(report); });
  }

  // Ends every watcher after its queued reports.
  void Close() {
    std::vector<std::shared_ptr<Writer>> watchers;
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
      watchers.swap(watchers_);
    }
    for (const auto& watcher : watchers) watcher->Close(Ended());
  }

  size_t num_watchers() const {
    std::lock_guard lock(mutex_);
    return watchers_.size();
  }

 private:
  static absl::Status Ended() { return absl::UnavailableError("the server is draining"); }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Writer>> watchers_;
  bool closed_ = false;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_STEP_BROADCASTER_H_
