#include "services/rollout/engine/engine.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/physical_cores.h"
#include "common/base/status_macros.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/tensor/staged_weight_receiver.h"
#include "services/rollout/engine/generator.h"
#include "services/rollout/engine/loaded_models.h"
#include "services/rollout/engine/request_check.h"
#include "services/rollout/engine/scorer.h"
#include "services/rollout/engine/torch_runner.h"

namespace tandem::rollout {
namespace {

// Deadlines of held sequences are looked at this often while the engine is paused.
constexpr std::chrono::milliseconds kPausedPoll(100);
constexpr int64_t kQueueRetryMilliseconds = 500;

absl::Status ShutDownStatus() { return absl::UnavailableError("the engine is shut down"); }

// Everything that touches a model or a sequence runs on the engine thread, as a command between two
// steps. The mutex guards the inbox and the published numbers only.
class EngineImpl : public Engine {
 public:
  EngineImpl(const EngineOptions& options, LoadedModels models)
      : options_(options),
        info_(std::move(models.info)),
        limits_{.vocab_size = info_.senior.vocab_size,
                .max_model_len = models.max_model_len,
                .max_samples = options.max_queue,
                .has_junior = models.junior != nullptr},
        boundaries_(std::move(models.boundaries)) {
    const int64_t slots = options.max_num_seqs + kScoreSlots;
    senior_weights_.digest = models.senior_digest;
    std::optional<WeightSpec> tied_head;
    if (models.senior->tied()) {
      tied_head = {.name = "lm_head.weight",
                   .shape = models.senior->Parameter(kEmbeddingName).sizes().vec()};
    }
    weights_ = std::make_unique<StagedWeightReceiver>(
        ParameterSpecs(*models.senior), tied_head, senior_weights_,
        [this](const WeightManifest& manifest, absl::Span<const std::byte> stream) {
          return RunOnEngine([&] { return SwapWeights(manifest, stream); });
        });
    senior_ = std::make_unique<TorchRunner>(std::move(models.senior), slots, models.max_model_len);
    if (models.junior != nullptr) {
      junior_ =
          std::make_unique<TorchRunner>(std::move(models.junior), slots, models.max_model_len);
    }
    generator_ = std::make_unique<Generator>(
        GeneratorOptions{.limits = {.max_num_seqs = options.max_num_seqs,
                                    .max_batched_tokens = options.max_batched_tokens},
                         .max_model_len = models.max_model_len,
                         .eos_token_ids = std::move(models.eos_token_ids),
                         .senior_weights = senior_weights_,
                         .junior_version = info_.junior_version},
        boundaries_.get(), senior_.get(), junior_.get());
    stats_.kv_capacity_tokens = options.max_num_seqs * models.max_model_len;
    thread_ = std::thread([this] { Loop(); });
  }

  ~EngineImpl() override { Shutdown(); }

  EngineInfo Info() const override { return info_; }

  absl::Status Validate(const PromptRequest& request) const override {
    return CheckPrompt(request, limits_);
  }

  absl::StatusOr<std::vector<PromptId>> Submit(std::vector<Submission> batch) override {
    int64_t samples = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      TANDEM_RETURN_IF_ERROR(
          PrependFieldPath(absl::StrCat("prompts[", i, "]"), Validate(batch[i].request)));
      samples += batch[i].request.num_samples;
    }
    std::lock_guard lock(mutex_);
    if (stopping_) return ShutDownStatus();
    const int64_t queued = inbox_samples_ + stats_.sequences_waiting;
    if (queued + samples > options_.max_queue) {
      absl::Status full = absl::ResourceExhaustedError(
          absl::StrCat("the queue holds ", queued, " of ", options_.max_queue,
                       " sequences; no room for ", samples, " more"));
      // What can never fit is not worth trying again.
      return samples > options_.max_queue ? full : WithRetryAfter(full, kQueueRetryMilliseconds);
    }
    std::vector<PromptId> ids;
    for (size_t i = 0; i < batch.size(); ++i) ids.push_back(next_id_++);
    inbox_samples_ += samples;
    // std::function wants a copyable closure.
    auto shared = std::make_shared<std::vector<Submission>>(std::move(batch));
    PostLocked([this, shared, ids, samples] {
      for (size_t i = 0; i < ids.size(); ++i) {
        generator_->Submit(ids[i], std::move((*shared)[i].request),
                           std::move((*shared)[i].listener));
      }
      std::lock_guard lock(mutex_);
      inbox_samples_ -= samples;
      PublishLocked();
    });
    return ids;
  }

  void Cancel(const std::vector<PromptId>& prompts) override {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    PostLocked([this, prompts] {
      for (const PromptId id : prompts) {
        generator_->Fail(id, absl::CancelledError("the caller cancelled"));
      }
    });
  }

  absl::StatusOr<ScoreResult> Score(const ScoreRequest& request, absl::Time deadline,
                                    const std::function<bool()>& cancelled) override {
    TANDEM_RETURN_IF_ERROR(CheckScore(request, limits_));
    ScoreResult result;
    TANDEM_RETURN_IF_ERROR(
        RunOnEngine([&] { return RunScore(request, deadline, cancelled, result); }));
    return result;
  }

  int64_t Pause() override {
    int64_t held = 0;
    RunOnEngine([&] {
      paused_ = true;
      held = generator_->running();
      return absl::OkStatus();
    }).IgnoreError();
    return held;
  }

  void Resume() override {
    RunOnEngine([&] {
      paused_ = false;
      return absl::OkStatus();
    }).IgnoreError();
  }

  EngineStats Stats() const override {
    std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.sequences_waiting += inbox_samples_;
    return stats;
  }

  WeightReceiver& weights() override { return *weights_; }

  void Shutdown() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      wake_.notify_all();
    }
    std::call_once(joined_, [this] { thread_.join(); });
  }

 private:
  using Command = std::function<void()>;

  void PostLocked(Command command) {
    inbox_.push_back(std::move(command));
    wake_.notify_all();
  }

  // Runs `body` between two steps and waits for it. UNAVAILABLE when the engine is shut down.
  absl::Status RunOnEngine(std::function<absl::Status()> body) {
    std::promise<absl::Status> done;
    std::future<absl::Status> result = done.get_future();
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return ShutDownStatus();
      PostLocked([&] {
        absl::Status status = CatchTorchErrors("rollout engine", body);
        Publish();  // the caller's next Stats() shows what it did
        done.set_value(std::move(status));
      });
    }
    return result.get();
  }

  void Loop() {
    // Both are settings of the thread.
    at::set_num_threads(options_.num_threads > 0 ? options_.num_threads : PhysicalCores());
    const c10::InferenceMode inference_mode;
    for (;;) {
      std::deque<Command> commands;
      bool stopping = false;
      {
        std::unique_lock lock(mutex_);
        const auto ready = [&] {
          return stopping_ || !inbox_.empty() || (!paused_ && generator_->HasWork());
        };
        if (generator_->HasWork()) {
          wake_.wait_for(lock, kPausedPoll, ready);
        } else {
          wake_.wait(lock, ready);
        }
        commands.swap(inbox_);
        stopping = stopping_;
      }
      for (const Command& command : commands) command();
      if (stopping) break;
      generator_->ExpireDeadlines(absl::Now());
      if (!paused_) generator_->Step();
      Publish();
    }
    generator_->FailAll(absl::CancelledError("the engine was shut down"));
    Publish();
  }

  void Publish() {
    std::lock_guard lock(mutex_);
    PublishLocked();
  }

  void PublishLocked() {
    generator_->FillStats(stats_);
    stats_.paused = paused_;
  }

  absl::Status SwapWeights(const WeightManifest& manifest, absl::Span<const std::byte> stream) {
    TANDEM_RETURN_IF_ERROR(ApplyWeights(manifest, stream, senior_->model()));
    senior_weights_ = {.version = manifest.version, .digest = manifest.digest};
    generator_->OnSeniorUpdated(senior_weights_, options_.on_weight_update);
    return absl::OkStatus();
  }

  absl::Status RunScore(const ScoreRequest& request, absl::Time deadline,
                        const std::function<bool()>& cancelled, ScoreResult& result) {
    const auto check = [&]() -> absl::Status {
      if (absl::Now() >= deadline) {
        return absl::DeadlineExceededError("the deadline passed before the scores were ready");
      }
      if (cancelled && cancelled()) return absl::CancelledError("the caller cancelled");
      generator_->NoteProgress(absl::Now());
      Publish();
      std::lock_guard lock(mutex_);
      return stopping_ ? ShutDownStatus() : absl::OkStatus();
    };
    result.weights = senior_weights_;
    result.sequences.resize(request.sequences.size());
    const auto run = [&](ModelRunner& runner,
                         std::vector<float> SequenceScores::*field) -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(auto logprobs,
                              ScoreWith(runner, request.sequences, request.temperature,
                                        options_.max_batched_tokens, check));
      for (size_t i = 0; i < logprobs.size(); ++i) {
        result.sequences[i].*field = std::move(logprobs[i]);
      }
      return absl::OkStatus();
    };
    if (request.senior) {
      TANDEM_RETURN_IF_ERROR(run(*senior_, &SequenceScores::senior_logprobs));
    }
    if (request.junior) {
      TANDEM_RETURN_IF_ERROR(run(*junior_, &SequenceScores::junior_logprobs));
    }
    return absl::OkStatus();
  }

  const EngineOptions options_;
  const EngineInfo info_;
  const RequestLimits limits_;
  const std::unique_ptr<BoundarySets> boundaries_;
  std::unique_ptr<StagedWeightReceiver> weights_;

  // Engine thread only.
  std::unique_ptr<TorchRunner> senior_;
  std::unique_ptr<TorchRunner> junior_;
  std::unique_ptr<Generator> generator_;
  WeightsVersion senior_weights_;
  bool paused_ = false;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Command> inbox_;
  int64_t inbox_samples_ = 0;  // of prompts that the generator has not seen
  PromptId next_id_ = 1;
  bool stopping_ = false;
  EngineStats stats_;

  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options) {
  return CatchTorchErrors("models", [&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    TANDEM_ASSIGN_OR_RETURN(LoadedModels models, LoadModels(options));
    return std::make_unique<EngineImpl>(options, std::move(models));
  });
}

}  // namespace tandem::rollout
