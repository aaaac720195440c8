// For tests: an engine without models. Every response is max_tokens long; token t is 100 + t, and
// the senior writes even t. While the engine is `paused`, scores wait too.
#ifndef TANDEM_SERVICES_ROLLOUT_SERVICE_TESTING_FAKE_ENGINE_H_
#define TANDEM_SERVICES_ROLLOUT_SERVICE_TESTING_FAKE_ENGINE_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "services/rollout/engine/engine.h"

namespace tandem::rollout {

class FakeEngine final : public Engine {
 public:
  static constexpr int32_t kVocabulary = 1000;

  FakeEngine() : thread_([this] { Run(); }) {}
  ~FakeEngine() override { Shutdown(); }

  EngineInfo Info() const override {
    EngineInfo info;
    info.senior = {.path = "senior-dir",
                   .model_type = "llama",
                   .vocab_size = kVocabulary,
                   .num_parameters = 12345,
                   .max_model_len = 2048,
                   .eos_token_ids = {2},
                   .vocabulary_digest = "vocabulary-digest"};
    info.junior = info.senior;
    info.junior->path = "junior-dir";
    info.junior_version = "junior-digest";
    info.sentence_boundary_token_ids = {7};
    info.word_boundary_token_ids = {8, 9};
    info.max_num_seqs = 64;
    return info;
  }

  absl::Status Validate(const PromptRequest& request) const override {
    if (request.prompt_token_ids.empty()) return InvalidField("prompt_token_ids", "is required");
    for (size_t i = 0; i < request.prompt_token_ids.size(); ++i) {
      const int32_t id = request.prompt_token_ids[i];
      if (id < 0 || id >= kVocabulary) {
        return InvalidField("prompt_token_ids[" + std::to_string(i) + "]", "out of range");
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<PromptId>> Submit(std::vector<Submission> batch) override {
    std::lock_guard lock(mutex_);
    if (running_.size() + batch.size() > max_prompts) {
      return WithRetryAfter(absl::ResourceExhaustedError("the queue is full"), 100);
    }
    std::vector<PromptId> ids;
    ++submissions;
    for (Submission& submission : batch) {
      last_request = submission.request;
      last_stream = submission.stream;
      running_[next_id_] = {std::move(submission), 0};
      ids.push_back(next_id_++);
    }
    changed_.notify_all();
    return ids;
  }

  void Cancel(const std::vector<PromptId>& prompts) override {
    std::lock_guard lock(mutex_);
    cancelled_.insert(cancelled_.end(), prompts.begin(), prompts.end());
    changed_.notify_all();
  }

  absl::Status Score(ScoreRequest request, const CallScope&, ScoreDone done) override {
    ScoreResult result;
    result.weights = {.version = 5, .digest = "weights-digest"};
    for (const ScoreSequence& sequence : request.sequences) {
      const std::vector<float> scores(sequence.token_ids.size() - sequence.first_scored_token,
                                      static_cast<float>(-request.temperature));
      result.sequences.push_back({request.senior ? scores : std::vector<float>(),
                                  request.junior ? scores : std::vector<float>()});
    }
    std::lock_guard lock(mutex_);
    scores_.emplace_back([done = std::move(done), result] { done(result); });
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Pause(const CallScope&) override {
    paused = true;
    return Stats().sequences_running;
  }
  absl::Status Resume(const CallScope&) override {
    Go();
    return absl::OkStatus();
  }
  // Ends a pause.
  void Go() {
    paused = false;
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  int64_t scores_waiting() const {
    std::lock_guard lock(mutex_);
    return static_cast<int64_t>(scores_.size());
  }

  EngineStats Stats() const override {
    std::lock_guard lock(mutex_);
    EngineStats stats;
    for (const auto& [id, prompt] : running_) {
      stats.sequences_running += prompt.submission.request.num_samples;
    }
    stats.senior_tokens_total = senior_tokens_;
    stats.junior_tokens_total = junior_tokens_;
    stats.paused = paused;
    return stats;
  }

  absl::Status Health() const override { return absl::OkStatus(); }

  WeightReceiver& weights() override { return receiver_; }

  void Shutdown() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  bool ended() const override { return false; }

  std::atomic<bool> paused = false;
  std::atomic<size_t> max_prompts = 1000;
  std::atomic<int> submissions = 0;
  // Of the last prompt; read them when nothing is submitted.
  PromptRequest last_request;
  uint64_t last_stream = 0;

 private:
  struct Prompt {
    Submission submission;
    int64_t written = 0;
  };
  class Receiver final : public WeightReceiver {
   public:
    absl::StatusOr<int64_t> Begin(const std::string&, const WeightManifest&, bool) override {
      return 0;
    }
    absl::StatusOr<int64_t> Append(const std::string&, int64_t,
                                   absl::Span<const std::byte>) override {
      return 0;
    }
    absl::StatusOr<int64_t> AppendShared(const std::string&, int64_t,
                                         const std::shared_ptr<const SharedBytes>&,
                                         absl::Span<const FileRange>) override {
      return 0;
    }
    absl::StatusOr<WeightsVersion> Commit(const std::string&, const CallScope&) override {
      return Version();
    }
    absl::Status Abort(const std::string&) override { return absl::OkStatus(); }
    WeightsVersion Version() const override { return {5, "weights-digest"}; }
    std::string OpenUpdateId() const override { return ""; }
  };

  static Trajectory Response(const PromptRequest& request, uint64_t sample) {
    Trajectory t;
    t.prompt_token_ids = request.prompt_token_ids;
    for (int32_t i = 0; i < request.sampling.max_tokens; ++i) {
      t.response_token_ids.push_back(100 + i % 800);
      t.authorship_mask.push_back(i % 2 == 0 ? Author::kSenior : Author::kJunior);
      t.author_logprobs.push_back(-0.5f);
    }
    t.senior_versions = {{{5, "weights-digest"}, request.sampling.max_tokens}};
    t.finish_reason = FinishReason::kLength;
    t.seed = request.seed;
    t.sample_index = sample;
    t.sampling = request.sampling;
    t.tandem = request.tandem;
    return t;
  }

  // Makes a step: one token of every sample of every running prompt.
  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] {
        return stop_ || !cancelled_.empty() || (!paused && !(running_.empty() && scores_.empty()));
      });
      std::vector<Prompt> failed;
      for (const PromptId id : cancelled_) {
        if (auto node = running_.extract(id)) failed.push_back(std::move(node.mapped()));
      }
      cancelled_.clear();
      if (stop_) {
        for (auto& [id, prompt] : running_) failed.push_back(std::move(prompt));
        running_.clear();
      }
      std::vector<std::pair<PromptId, Prompt>> step;
      if (!paused && !stop_) {
        for (auto& [id, prompt] : running_) {
          step.emplace_back(id, prompt);
          ++prompt.written;
          (prompt.written % 2 == 1 ? senior_tokens_ : junior_tokens_) +=
              prompt.submission.request.num_samples;
        }
        std::erase_if(running_, [](const auto& entry) {
          return entry.second.written == entry.second.submission.request.sampling.max_tokens;
        });
      }
      std::vector<std::function<void()>> scores;
      if (!paused) scores.swap(scores_);
      const bool stop = stop_;
      lock.unlock();
      for (const auto& score : scores) score();
      for (const Prompt& prompt : failed) {
        prompt.submission.listener->OnFailed(absl::CancelledError("cancelled"));
      }
      for (const auto& [id, prompt] : step) Step(prompt);
      if (stop) return;
      lock.lock();
    }
  }
  static void Step(const Prompt& prompt) {
    const PromptRequest& request = prompt.submission.request;
    for (int64_t sample = 0; sample < request.num_samples; ++sample) {
      const int64_t t = prompt.written;
      if (request.stream_tokens) {
        prompt.submission.listener->OnTokens({static_cast<uint64_t>(sample),
                                              t,
                                              {static_cast<int32_t>(100 + t % 800)},
                                              {t % 2 == 0 ? Author::kSenior : Author::kJunior}});
      }
      if (t + 1 == request.sampling.max_tokens) {
        prompt.submission.listener->OnFinished(
            Response(request, static_cast<uint64_t>(sample)),
            {.counts = {.drafted = 4, .accepted = 3}, .accepted_mask = {1, 1, 0, 1, 0}});
      }
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  PromptId next_id_ = 1;
  std::map<PromptId, Prompt> running_;
  std::vector<PromptId> cancelled_;
  std::vector<std::function<void()>> scores_;
  int64_t senior_tokens_ = 0;
  int64_t junior_tokens_ = 0;
  Receiver receiver_;
  std::thread thread_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_SERVICE_TESTING_FAKE_ENGINE_H_
