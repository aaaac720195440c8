// A listener that records the events of a prompt.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RECORDING_LISTENER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RECORDING_LISTENER_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "services/rollout/engine/types.h"

namespace tandem::rollout {

class RecordingListener : public PromptListener {
 public:
  explicit RecordingListener(int64_t samples) : expected_(samples) {}

  void OnTokens(TokensDelta delta) override {
    std::lock_guard lock(mutex_);
    deltas_.push_back(std::move(delta));
    changed_.notify_all();
  }
  void OnFinished(Trajectory trajectory, SampleDrafts drafts) override {
    std::lock_guard lock(mutex_);
    const uint64_t index = trajectory.sample_index;
    finished_.emplace(index, std::move(trajectory));
    drafts_.emplace(index, std::move(drafts));
    changed_.notify_all();
  }
  void OnFailed(absl::Status status) override {
    std::lock_guard lock(mutex_);
    failure_ = std::move(status);
    changed_.notify_all();
  }

  // Blocks until every sample has finished or the prompt has failed.
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return DoneLocked(); });
  }
  // Blocks until `count` tokens were streamed, or the end.
  void WaitForTokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return deltas_.size() >= count || DoneLocked(); });
  }

  bool done() const {
    std::lock_guard lock(mutex_);
    return DoneLocked();
  }
  std::optional<absl::Status> failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  // Indexed by sample.
  std::map<uint64_t, Trajectory> finished() const {
    std::lock_guard lock(mutex_);
    return finished_;
  }
  std::map<uint64_t, SampleDrafts> drafts() const {
    std::lock_guard lock(mutex_);
    return drafts_;
  }
  std::vector<TokensDelta> deltas() const {
    std::lock_guard lock(mutex_);
    return deltas_;
  }

 private:
  bool DoneLocked() const {
    return failure_.has_value() || static_cast<int64_t>(finished_.size()) == expected_;
  }

  const int64_t expected_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Trajectory> finished_;
  std::map<uint64_t, SampleDrafts> drafts_;
  std::vector<TokensDelta> deltas_;
  std::optional<absl::Status> failure_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_RECORDING_LISTENER_H_
