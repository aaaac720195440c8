// For tests: a trainer engine without a model.
#ifndef TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FAKE_ENGINE_H_
#define TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FAKE_ENGINE_H_

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/base/engine_thread.h"
#include "common/base/errors/error.h"
#include "common/weights/testing/stream_digest.h"
#include "services/trainer/engine/engine.h"

namespace tandem::trainer {

// A source of `size` bytes, in a pattern that depends on the version.
class FakeWeights final : public WeightSource {
 public:
  // With a speculator, that has the last `speculator` bytes.
  explicit FakeWeights(int64_t version, int64_t size = 40, int64_t speculator = 0) {
    for (int64_t i = 0; i < size; ++i) {
      bytes_.push_back(static_cast<std::byte>((i * 7 + version) % 251));
    }
    manifest_.version = version;
    const int64_t model = size - speculator;
    manifest_.tensors = {{"w", DType::kFloat32, {model / 4}}};
    manifest_.total_bytes = size;
    manifest_.digest = StreamDigest(manifest_.tensors, bytes_);
    if (speculator == 0) return;
    const WeightSpec heads = {"speculator.h", DType::kFloat32, {speculator / 4}};
    manifest_.tensors.push_back(heads);
    manifest_.components = {{.name = kSpeculatorComponent,
                             .config = "{}",
                             .digest = StreamDigest({heads}, absl::MakeSpan(bytes_).subspan(
                                                                 static_cast<size_t>(model)))}};
  }
  // Keeps the tensor of a model alone in the wanted types; the second one has the first bytes of
  // the first.
  void Keep(const std::vector<TensorTypes>& receivers) {
    const std::vector<std::byte> whole = std::exchange(bytes_, {});
    const WeightSpec model = manifest_.tensors[0];
    manifest_.tensors.clear();
    manifest_.total_bytes = 0;
    const auto wants = [](DType type) {
      return [type](const TensorTypes& types) {
        return (types.contains("w") ? types.at("w") : DType::kFloat32) == type;
      };
    };
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      if (std::ranges::none_of(receivers, wants(type))) continue;
      const WeightSpec kept = {"w", type, model.shape};
      bytes_.insert(bytes_.end(), whole.begin(), whole.begin() + kept.bytes());
      sums_.push_back(SumBytes(0, whole.data(), kept.bytes()));
      manifest_.tensors.push_back(kept);
      manifest_.total_bytes += kept.bytes();
    }
  }
  const WeightManifest& manifest() const override { return manifest_; }
  absl::Span<const WordSums> sums() const override { return sums_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    std::copy_n(bytes_.begin() + offset, out.size(), out.begin());
    return absl::OkStatus();
  }
  // Offers the bytes as memory of a GPU, too.
  void OfferGpu() { gpu_ = {{.machine = MachineId(), .size = std::ssize(bytes_)}}; }
  absl::Span<const GpuMemory> gpu_memories() const override { return gpu_; }

 private:
  WeightManifest manifest_;
  std::vector<std::byte> bytes_;
  std::vector<WordSums> sums_;
  std::vector<GpuMemory> gpu_;
};

// Every step adds 1 to the version; a known request id is replayed. FailNext fails one call.
class FakeEngine final : public Engine {
 public:
  EngineInfo Info() const override {
    std::lock_guard lock(mutex_);
    EngineInfo info;
    info.model.path = "/models/fake";
    info.model.model_type = "fake";
    info.model.vocab_size = 16;
    info.model.vocabulary_digest = "vocabulary";
    info.weights.version = version_;
    info.optimizer_steps = version_;
    info.weights.digest = FakeWeights(version_).manifest().digest;
    return info;
  }

  absl::Status Health() const override { return thread_.Health(); }
  bool unsaved() const override {
    std::lock_guard lock(mutex_);
    return unsaved_;
  }
  void Shutdown() override { thread_.Shutdown(); }
  bool ended() const override { return false; }

  absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                       const TrainStepRequest& request) override {
    return thread_.Run(call, [&] { return DoStep(request); });
  }

  // Returns -token as log-prob t, and the temperature as its entropy.
  absl::StatusOr<LogProbsResults> ComputeLogProbs(const CallScope&,
                                                  const LogProbsBatch& batch) override {
    std::lock_guard lock(mutex_);
    if (absl::Status error = TakeError(); !error.ok()) return error;
    LogProbsResults answers;
    for (const LogProbsRequest& request : batch.requests) {
      LogProbsResult& result = answers.results.emplace_back();
      for (const int32_t token : request.response_token_ids) {
        result.logprobs.push_back(static_cast<float>(-token));
        result.entropies.push_back(static_cast<float>(request.temperature));
      }
      result.weights.version = version_;
    }
    return answers;
  }

  absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(
      const CallScope&, const SnapshotRequest& request) override {
    std::lock_guard lock(mutex_);
    asked_types_ = request.receivers;
    asked_on_gpu_.push_back(request.on_gpu);
    if (absl::Status error = TakeError(); !error.ok()) return error;
    // More than a chunk, and not a multiple of a chunk.
    auto weights = std::make_shared<FakeWeights>(version_, (2 << 20) + 40 + speculator_bytes_,
                                                 speculator_bytes_);
    if (speculator_bytes_ == 0) weights->Keep(request.receivers);
    if (request.on_gpu) weights->OfferGpu();
    return weights;
  }

  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope&,
                                                   const training::SaveRequest& request) override {
    std::lock_guard lock(mutex_);
    if (absl::Status error = TakeError(); !error.ok()) return error;
    if (request.expected_version.value_or(version_) != version_) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "expected_version", "is another");
    }
    unsaved_ = false;
    saved_.push_back(request.directory + "/" + request.name);
    if (request.in_background) return checkpoint::Saved{.path = saved_.back(), .pending = true};
    return checkpoint::Saved{.path = saved_.back(), .bytes = 1234};
  }
  absl::Status LoadCheckpoint(const CallScope&, const training::LoadRequest& request) override {
    std::lock_guard lock(mutex_);
    if (absl::Status error = TakeError(); !error.ok()) return error;
    version_ = 41;
    loaded_ = request;
    unsaved_ = false;
    return absl::OkStatus();
  }
  absl::Status LoadBaseModel(const CallScope&) override {
    std::lock_guard lock(mutex_);
    if (absl::Status error = TakeError(); !error.ok()) return error;
    version_ = 0;
    unsaved_ = false;
    return absl::OkStatus();
  }
  absl::Status ExportModel(const CallScope&, const ConfinedPath&, DType dtype) override {
    std::lock_guard lock(mutex_);
    export_dtype_ = dtype;
    return TakeError();
  }

  // Test controls.
  void FailNext(absl::Status error) {
    std::lock_guard lock(mutex_);
    next_error_ = std::move(error);
  }
  // Sets a metric of the reports of later steps.
  void Report(const std::string& metric, double value) {
    std::lock_guard lock(mutex_);
    metrics_[metric] = value;
  }
  // Snapshots have a speculator of so many bytes.
  void AddSpeculator(int64_t bytes) {
    std::lock_guard lock(mutex_);
    speculator_bytes_ = bytes;
  }
  // Skips the next step, as for a number that is not finite.
  void SkipNext() {
    std::lock_guard lock(mutex_);
    skip_next_ = true;
  }
  void Hold() {
    std::lock_guard lock(mutex_);
    hold_ = true;
  }
  void Release() {
    std::lock_guard lock(mutex_);
    hold_ = false;
    changed_.notify_all();
  }
  // Waits until `count` train steps have begun.
  void WaitForSteps(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ >= count; });
  }
  std::vector<TrainStepRequest> steps() const {
    std::lock_guard lock(mutex_);
    return steps_;
  }
  int64_t version() const {
    std::lock_guard lock(mutex_);
    return version_;
  }
  DType export_dtype() const { return export_dtype_; }
  std::vector<std::string> saved() const {
    std::lock_guard lock(mutex_);
    return saved_;
  }

  // The types that the last snapshot was asked for.
  std::vector<TensorTypes> asked_types() const {
    std::lock_guard lock(mutex_);
    return asked_types_;
  }
  // Whether each snapshot was asked for on a GPU.
  std::vector<bool> asked_on_gpu() const {
    std::lock_guard lock(mutex_);
    return asked_on_gpu_;
  }
  double critic_seconds = 0;  // of every step from now on
  // The last checkpoint that was loaded.
  training::LoadRequest loaded() const {
    std::lock_guard lock(mutex_);
    return loaded_;
  }

 private:
  absl::StatusOr<StepResult> DoStep(const TrainStepRequest& request) {
    std::unique_lock lock(mutex_);
    ++running_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !hold_; });
    if (absl::Status error = TakeError(); !error.ok()) return error;
    if (const auto done = done_.find(request.request_id); done != done_.end()) {
      return StepResult{.report = done->second, .replayed = true};
    }
    steps_.push_back(request);
    StepReport report;
    report.run_id = request.run_id;
    report.step = request.step;
    report.skipped = std::exchange(skip_next_, false);
    if (!report.skipped) ++version_;
    report.weights.version = version_;
    report.metrics = metrics_;
    done_[request.request_id] = report;
    unsaved_ = true;
    return StepResult{
        .report = report, .not_finite = report.skipped, .critic_seconds = critic_seconds};
  }

  absl::Status TakeError() { return std::exchange(next_error_, absl::OkStatus()); }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool hold_ = false;
  bool skip_next_ = false;
  int running_ = 0;
  int64_t version_ = 0;
  int64_t speculator_bytes_ = 0;
  absl::Status next_error_;
  std::map<std::string, StepReport> done_;
  std::map<std::string, double> metrics_ = {
      {"loss/total", 0.5}, {"tokens/response", 2}, {"reward/mean", 1}};
  std::vector<TrainStepRequest> steps_;
  DType export_dtype_ = DType::kInt8;
  bool unsaved_ = false;
  training::LoadRequest loaded_;
  std::vector<TensorTypes> asked_types_;
  std::vector<bool> asked_on_gpu_;
  std::vector<std::string> saved_;
  EngineThread thread_{{.name = "fake"}};
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_SERVICE_TESTING_FAKE_ENGINE_H_
