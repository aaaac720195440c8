// For tests: a critic engine without a model.
#ifndef TANDEM_SERVICES_CRITIC_SERVICE_TESTING_FAKE_ENGINE_H_
#define TANDEM_SERVICES_CRITIC_SERVICE_TESTING_FAKE_ENGINE_H_

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "services/critic/engine/engine.h"

namespace tandem::critic {

// Value t is the token itself, the final value their number. Every step adds 1 to the version; a
// known request id is replayed.
class FakeEngine final : public Engine {
 public:
  EngineInfo Info() const override {
    std::lock_guard lock(mutex_);
    EngineInfo info;
    info.model.model_type = "fake";
    info.model.vocab_size = 16;
    info.weights = {.version = version_, .digest = "digest"};
    info.optimizer_steps = version_;
    return info;
  }
  bool value_head_from_checkpoint() const override { return false; }
  absl::Status Health() const override { return absl::OkStatus(); }
  bool unsaved() const override {
    std::lock_guard lock(mutex_);
    return unsaved_;
  }
  void Shutdown() override {}
  bool ended() const override { return false; }

  absl::StatusOr<ValuesResults> ComputeValues(const CallScope& call,
                                              const ValuesBatch& batch) override {
    std::unique_lock lock(mutex_);
    last_values_ = batch.requests.back();
    changed_.notify_all();
    changed_.wait(lock, call.cancellation, [&] { return !silent_; });
    if (absl::Status error = TakeError(); !error.ok()) return error;
    ValuesResults answers;
    for (const ValuesRequest& request : batch.requests) {
      ValuesResult& result = answers.results.emplace_back();
      for (const int32_t token : request.response_token_ids) {
        result.values.push_back(static_cast<float>(token));
      }
      result.final_value = static_cast<float>(result.values.size());
      result.weights.version = version_ + (drift_ ? drifted_++ : 0);
    }
    return answers;
  }
  absl::StatusOr<StepResult> TrainStep(const CallScope&, const TrainStepRequest& request) override {
    std::lock_guard lock(mutex_);
    ++calls_;
    if (const auto done = done_.find(request.request_id); done != done_.end()) {
      return StepResult{.report = done->second, .replayed = true};
    }
    if (request.expected_version != version_) return absl::FailedPreconditionError("stale");
    steps_.push_back(request);
    StepReport report{.run_id = request.run_id, .step = request.step};
    report.skip_reason = std::exchange(skip_next_, "");
    report.skipped = !report.skip_reason.empty();
    if (!report.skipped) ++version_;
    report.weights.version = version_;
    unsaved_ = true;
    report.metrics = {{"critic/loss", 0.25}};
    done_[request.request_id] = report;
    // Fails after the step was applied, as if the answer were lost.
    if (absl::Status error = TakeError(); !error.ok()) return error;
    return StepResult{.report = report, .replayed = false};
  }
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope&,
                                                   const training::SaveRequest& request) override {
    return checkpoint::Saved{request.directory + "/" + request.name, 99};
  }
  absl::Status LoadCheckpoint(const CallScope&, const training::LoadRequest& request) override {
    std::lock_guard lock(mutex_);
    version_ = 7;
    loaded_ = request;
    return absl::OkStatus();
  }
  absl::Status LoadBaseModel(const CallScope&) override {
    std::lock_guard lock(mutex_);
    version_ = 0;
    unsaved_ = false;
    return absl::OkStatus();
  }
  absl::Status ExportModel(const CallScope&, const ConfinedPath&, DType) override {
    return absl::OkStatus();
  }

  // Test controls.
  void FailNext(absl::Status error) {
    std::lock_guard lock(mutex_);
    next_error_ = std::move(error);
  }
  void SkipNext(std::string reason) {
    std::lock_guard lock(mutex_);
    skip_next_ = std::move(reason);
  }
  // From now on every ComputeValues answers with a newer version.
  void Drift() {
    std::lock_guard lock(mutex_);
    drift_ = true;
  }
  // From now on ComputeValues waits until its caller leaves.
  void BeSilent() {
    std::lock_guard lock(mutex_);
    silent_ = true;
  }
  // Waits for a request for values, and returns the last one.
  ValuesRequest WaitForValuesRequest() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return last_values_.has_value(); });
    return *last_values_;
  }
  std::vector<TrainStepRequest> steps() const {
    std::lock_guard lock(mutex_);
    return steps_;
  }
  int calls() const {
    std::lock_guard lock(mutex_);
    return calls_;
  }

  // The last checkpoint that was loaded.
  training::LoadRequest loaded() const {
    std::lock_guard lock(mutex_);
    return loaded_;
  }

 private:
  absl::Status TakeError() { return std::exchange(next_error_, absl::OkStatus()); }

  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  bool silent_ = false;
  std::optional<ValuesRequest> last_values_;
  int64_t version_ = 0;
  bool unsaved_ = false;
  training::LoadRequest loaded_;
  bool drift_ = false;
  int64_t drifted_ = 0;
  int calls_ = 0;
  absl::Status next_error_;
  std::string skip_next_;
  std::map<std::string, StepReport> done_;
  std::vector<TrainStepRequest> steps_;
};

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_SERVICE_TESTING_FAKE_ENGINE_H_
