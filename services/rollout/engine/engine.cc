#include "services/rollout/engine/engine.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/base/engine_thread.h"
#include "common/base/errors/error.h"
#include "common/base/errors/memory_error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/base/struct_bytes.h"
#include "common/model/compute_setup.h"
#include "common/model/passes/layer_cache.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/staged_weight_receiver.h"
#include "services/rollout/engine/models/senior_update.h"
#include "services/rollout/engine/models/tandem_model_manager.h"
#include "services/rollout/engine/options_check.h"
#include "services/rollout/engine/ranks/engine_ranks.h"
#include "services/rollout/engine/ranks/ranked_runner.h"
#include "services/rollout/engine/ranks/shard_weights.h"
#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/schedule/queue_drain.h"
#include "services/rollout/engine/schedule/request_check.h"
#include "services/rollout/engine/schedule/scorer.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kScoreRetryMilliseconds = 500;
// Time of a scoring pass between two steps of generation, in those steps' time.
constexpr int kScoreShare = 2;

// Limits for the scores that wait or run: their number, and the bytes of their tokens and results.
constexpr int64_t kMaxScores = 64;
constexpr int64_t kMaxScoreBytes = 256 << 20;

// Returns the longest window of the layers of a lane, which may have no model.
int64_t WindowOf(const TandemModelManager::Lane& lane) {
  return lane.shard == nullptr ? kNoWindow : LongestWindow(lane.shard->model().CacheLayout());
}

int64_t TokensWithDrafts(const ComputeOptions& compute) {
  return MaxTokensWithDrafts(compute.device == "cpu",
                             compute.dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat32);
}

// Returns the bytes that a record of the routing takes for a token in a message (trajectory.proto).
int64_t RoutingBytesOf(const TandemModelManager::Lane& senior) {
  if (senior.shard == nullptr) return 0;
  const RoutingCache layout = senior.shard->model().config().RoutingLayout();
  return layout.ids_per_token() * (layout.is_narrow() ? 1 : static_cast<int64_t>(sizeof(int32_t)));
}

int64_t SizeBytes(const ScoreRequest& request) {
  int64_t tokens = 0;
  for (const ScoreSequence& sequence : request.sequences) {
    tokens += static_cast<int64_t>(sequence.token_ids.size());
  }
  return tokens * static_cast<int64_t>(sizeof(int32_t) + 2 * sizeof(float));
}

RequestLimits LimitsOf(const TandemModelManager& models, int64_t max_samples) {
  const EngineInfo& info = models.info();
  const TandemModelManager::Lane& senior = models.senior();
  const bool has_junior = info.junior.has_value();
  return {.num_token_ids = info.senior.num_token_ids,
          .max_model_len = info.senior.max_model_len,
          .junior_max_model_len = has_junior ? info.junior->max_model_len : 0,
          .max_samples = max_samples,
          .has_junior = has_junior,
          .speculator_heads = info.speculator_heads,
          .routing_bytes_per_token = RoutingBytesOf(senior),
          .senior_has_window = WindowOf(senior) != kNoWindow,
          .has_vocabulary = models.vocabulary() != nullptr,
          .vision = {info.senior.vision, has_junior ? info.junior->vision : std::nullopt}};
}

// Commands and steps run on the engine thread, which alone runs and changes models, and touches
// sequences; the thread of a weight update reads the senior's layout (Model::PrepareWeights). A
// step is one of generation and then one of scoring. The mutex guards the state that other threads
// read.
class EngineImpl : public Engine {
 public:
  EngineImpl(const EngineOptions& options, std::shared_ptr<ranks::ServerRanks> ranks,
             std::unique_ptr<const TandemModelManager> models)
      : options_(options),
        info_(models->info()),
        limits_(LimitsOf(*models, options.max_queue)),
        ranks_(std::move(ranks)),
        models_(std::move(models)),
        senior_(models_->senior()),
        junior_(models_->junior()) {
    const WeightsVersion senior_weights = {.version = 0, .digest = senior_.digest};
    StagedWeightReceiver::OpenGpu open_gpu;
    if (senior_.shard != nullptr && CanShareMemory(senior_.shard->model().device())) {
      intake_ = TorchRunner::NewStream(senior_.shard->model().device());
      open_gpu = [this](absl::Span<const GpuMemory> memories) { return OpenOnAllRanks(memories); };
    }
    weights_ = std::make_unique<StagedWeightReceiver>(
        models_->senior_parameters(), models_->tied_head(), info_.senior.num_token_ids,
        senior_weights,
        [this] {
          return std::make_unique<SeniorUpdate>(
              senior_.shard->model(), senior_.shard->speculator(),
              /*keeps_tensors=*/senior_.ranks.sharded(), intake_,
              [this](SeniorUpdate& update, const WeightManifest& manifest, const CallScope& call) {
                return Apply(update, manifest, call);
              });
        },
        models_->components(), options.allow_not_finite_weights, models_->adapter(),
        std::move(open_gpu));
    generator_ = std::make_unique<Generator>(
        GeneratorOptions{.limits = {.max_num_seqs = options.max_num_seqs,
                                    .max_batched_tokens = options.max_batched_tokens,
                                    .num_blocks = {models_->blocks().senior.generator,
                                                   models_->blocks().junior.generator},
                                    .windows = {WindowOf(senior_), WindowOf(junior_)},
                                    .max_tokens_with_drafts = TokensWithDrafts(options.compute)},
                         .request_limits = limits_,
                         .eos_token_ids = models_->eos_token_ids(),
                         .vocabulary = models_->vocabulary(),
                         .senior_weights = senior_weights,
                         .junior_version = info_.junior_version,
                         .eager_lanes = options.eager_lanes},
        &models_->boundaries(), senior_.runner(), junior_.runner());
    const auto of_scorer = [](const LaneBlocks& lane) {
      return BlockRange{.first = static_cast<int32_t>(lane.generator), .count = lane.scorer};
    };
    scorer_ = std::make_unique<Scorer>(
        ScorerOptions{
            .max_batched_tokens = options.max_batched_tokens,
            .blocks = {of_scorer(models_->blocks().senior), of_scorer(models_->blocks().junior)},
            .request_limits = limits_},
        senior_weights, senior_.runner(), junior_.runner());
    stats_.kv_capacity_tokens = models_->blocks().senior.total() * kKvBlockTokens;
    AddCommands();
    thread_ = std::make_unique<EngineThread>(
        EngineThreadOptions{.name = "rollout engine",
                            .around = [this](absl::FunctionRef<void()> loop) { Live(loop); },
                            .step = [this] { return Step(); },
                            .step_failed = [this](const absl::Status& error) { FailAll(error); }});
  }

  ~EngineImpl() override { Shutdown(); }

  EngineInfo Info() const override { return info_; }

  absl::Status Validate(const PromptRequest& request) const override {
    return CheckPrompt(request, limits_);
  }

  absl::StatusOr<std::vector<PromptId>> Submit(std::vector<Submission> batch) override {
    const SteadyTime now = SteadyTime::Now();
    int64_t samples = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      TANDEM_RETURN_IF_ERROR(
          PrependFieldPath(absl::StrCat("prompts[", i, "]"), Validate(batch[i].request)));
      if (batch[i].request.deadline <= now) {
        return absl::DeadlineExceededError("the deadline passed before the prompts were queued");
      }
      samples += batch[i].request.num_samples;
    }
    std::vector<PromptId> ids;
    {
      std::lock_guard lock(mutex_);
      const int64_t queued = posted_samples_ + stats_.sequences_waiting;
      if (queued + samples > options_.max_queue) {
        absl::Status full = absl::ResourceExhaustedError(
            absl::StrCat("the queue holds ", queued, " of ", options_.max_queue,
                         " sequences; no room for ", samples, " more"));
        // A request that can never fit gets no retry hint.
        if (samples > options_.max_queue) return full;
        const absl::Duration hint = drain_.RetryAfter(now, queued + samples - options_.max_queue);
        return WithRetryAfter(full, absl::ToInt64Milliseconds(hint));
      }
      posted_samples_ += samples;
      for (size_t i = 0; i < batch.size(); ++i) ids.push_back(next_id_++);
    }
    // std::function needs a copyable closure.
    auto shared = std::make_shared<std::vector<Submission>>(std::move(batch));
    absl::Status posted = thread_->Post([this, shared, ids, samples] {
      const absl::Cleanup publish = [&] { Publish(samples); };
      for (size_t i = 0; i < ids.size(); ++i) {
        generator_->Submit(ids[i], std::move((*shared)[i]));
      }
    });
    if (!posted.ok()) {
      std::lock_guard lock(mutex_);
      posted_samples_ -= samples;
      return posted;
    }
    return ids;
  }

  void Cancel(const std::vector<PromptId>& prompts) override {
    // After Shutdown everything is cancelled already.
    thread_
        ->Post([this, prompts] {
          for (const PromptId id : prompts) {
            generator_->Fail(id, absl::CancelledError("the caller cancelled"));
          }
        })
        .IgnoreError();
  }

  absl::Status Score(ScoreRequest request, const CallScope& call, ScoreDone done) override {
    TANDEM_RETURN_IF_ERROR(CheckScore(request, limits_));
    const int64_t bytes = SizeBytes(request);
    {
      std::lock_guard lock(mutex_);
      if (scores_ == kMaxScores || score_bytes_ + bytes > kMaxScoreBytes) {
        return WithRetryAfter(absl::ResourceExhaustedError(
                                  absl::StrCat(scores_, " scores of ", score_bytes_,
                                               " bytes are waiting; no room for ", bytes, " more")),
                              kScoreRetryMilliseconds);
      }
      ++scores_;
      score_bytes_ += bytes;
    }
    // Released with the last copy of the closure.
    const std::shared_ptr<void> place(nullptr, [this, bytes](void*) {
      std::lock_guard lock(mutex_);
      --scores_;
      score_bytes_ -= bytes;
    });
    auto shared = std::make_shared<ScoreRequest>(std::move(request));
    return thread_->Post([this, shared, call, place, done = std::move(done)] {
      scorer_->Submit(std::move(*shared), call, [place, done](absl::StatusOr<ScoreResult> result) {
        done(std::move(result));
      });
    });
  }

  absl::StatusOr<int64_t> Pause(const CallScope& call) override {
    return thread_->Run(call, [&]() -> absl::StatusOr<int64_t> {
      generator_->Settle();
      paused_ = true;
      Publish();
      return generator_->running();
    });
  }

  absl::Status Resume(const CallScope& call) override {
    return thread_->Run(call, [&] {
      paused_ = false;
      Publish();
      return absl::OkStatus();
    });
  }

  EngineStats Stats() const override {
    // Before mutex_ is locked: the thread has a mutex of its own.
    const SteadyTime last_progress = thread_->last_progress();
    std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.sequences_waiting += posted_samples_;
    stats.last_progress = std::max(stats.last_progress, last_progress);
    return stats;
  }

  absl::Status Health() const override { return thread_->Health(); }

  WeightReceiver& weights() override { return *weights_; }

  void Shutdown() override { thread_->Shutdown(); }

  bool ended() const override { return ended_; }

 private:
  // Runs the engine thread from its start to its end. Work that still waits at the end fails; no
  // exception leaves this function (FailAll).
  void Live(absl::FunctionRef<void()> loop) {
    // Inference mode, the device and the number of threads are settings of the current thread.
    SetUpComputeThread(options_.compute);
    const c10::InferenceMode inference_mode;
    if (!ranks_->leads()) Follow();
    loop();
    FailAll(absl::CancelledError("the engine was shut down"));
    if (!ranks_->leads()) return;
    // If the ranks cannot be reached, this process is about to end.
    CatchTorchErrors("ranks", [&] {
      ranks_->AnnounceEnd();
      return absl::OkStatus();
    }).IgnoreError();
  }

  // Adds what a rank other than 0 executes for the commands of rank 0.
  void AddCommands() {
    commands_.Add<RankedPass>(
        kPassCommand, [this](const std::string&, const RankedPass& pass) -> absl::Status {
          const TandemModelManager::Lane& lane = pass.lane == Author::kSenior ? senior_ : junior_;
          return lane.shard == nullptr ? absl::OkStatus()
                                       : FollowPass(pass, *lane.shard, ranked_images_);
        });
    commands_.Add<std::vector<GpuMemory>>(
        kOpenMemoryCommand, [this](const std::string&, const std::vector<GpuMemory>& memories) {
          ranks_->Agree(Open(memories).status()).IgnoreError();
          return absl::OkStatus();
        });
    commands_.Add<RankedWeights>(
        kWeightsCommand, [this](const std::string&, const RankedWeights& weights) {
          if (senior_.shard == nullptr) return absl::OkStatus();
          shard_update_.reset();  // of a commit that was abandoned before its swap
          shard_update_ = std::make_unique<ShardUpdate>(weights, *senior_.ranks.weights_group,
                                                        senior_.shard->model(), *ranks_, intake_);
          return absl::OkStatus();
        });
    commands_.Add<AdoptedWeights>(kAdoptCommand, [this](const std::string&, const AdoptedWeights&) {
      if (senior_.shard == nullptr) return absl::OkStatus();
      shard_update_->AdoptInto(senior_.shard->model());
      senior_.shard->OnNewWeights();
      shard_update_.reset();
      return absl::OkStatus();
    });
  }

  // Executes the commands of rank 0 on another rank, until rank 0 shuts down.
  void Follow() {
    ranks_->Follow(commands_,
                   [this](const std::string&, absl::FunctionRef<absl::Status()> execute) {
                     absl::Status status = execute();
                     std::lock_guard lock(mutex_);
                     stats_.last_progress = SteadyTime::Now();
                     return status;
                   });
    ended_ = true;
  }

  // See EngineThreadOptions::step.
  SteadyTime Step() {
    const SteadyTime now = SteadyTime::Now();
    generator_->ExpireDeadlines(now);
    scorer_->DropAbandoned();
    const bool wrote = !paused_ && generator_->Step();
    if (scorer_->HasWork()) generator_->Settle();
    const bool waited_for = wrote && generator_->HasWork();
    const bool scored = scorer_->Step(waited_for ? kScoreShare * (SteadyTime::Now() - now)
                                                 : absl::InfiniteDuration());
    if (wrote || scored) thread_->NoteProgress();
    Publish();
    if (scorer_->HasWork()) return SteadyTime::InfinitePast();
    if (!generator_->HasWork()) return SteadyTime::InfiniteFuture();
    return paused_ ? generator_->next_deadline() : SteadyTime::InfinitePast();
  }

  // Fails all work, whatever the listeners throw.
  void FailAll(const absl::Status& status) {
    generator_->FailAll(status);
    scorer_->FailAll(status);
    Publish();
  }

  // Publishes the stats to other threads; the generator has taken `arrived` posted samples.
  void Publish(int64_t arrived = 0) {
    std::lock_guard lock(mutex_);
    generator_->FillStats(stats_);
    stats_.score_passes_total = scorer_->passes_total();
    stats_.senior_kv_tokens += scorer_->num_held_blocks(Author::kSenior) * kKvBlockTokens;
    stats_.junior_kv_tokens += scorer_->num_held_blocks(Author::kJunior) * kKvBlockTokens;
    stats_.paused = paused_;
    posted_samples_ -= arrived;
    arrived_samples_ += arrived;
    drain_.Observe(SteadyTime::Now(), stats_.sequences_waiting,
                   arrived_samples_ - stats_.sequences_waiting - stats_.sequences_running);
  }

  // Puts an update in force, on the thread of its commit.
  absl::Status Apply(SeniorUpdate& update, const WeightManifest& manifest, const CallScope& call) {
    if (senior_.ranks.sharded()) TANDEM_RETURN_IF_ERROR(SendToOtherRanks(update, call));
    return thread_->Run(call, [&] { return SwapWeights(update, manifest); });
  }

  // Opens memory for copies to this rank's shard of the senior, if it has one.
  absl::StatusOr<std::shared_ptr<const SharedBytes>> Open(absl::Span<const GpuMemory> memories) {
    if (senior_.shard == nullptr) return nullptr;
    return PeerMemory::Open(memories, senior_.shard->model().device());
  }

  // Opens memory if all ranks can: at the commit the others read it, too.
  absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenOnAllRanks(
      absl::Span<const GpuMemory> memories) {
    if (senior_.ranks.sharded()) {
      TANDEM_RETURN_IF_ERROR(CheckOthersOpen({memories.begin(), memories.end()}));
    }
    return Open(memories);
  }

  // Asks once for the memory of an update, so that the thread of its stream does not wait.
  absl::Status CheckOthersOpen(const std::vector<GpuMemory>& memories) {
    std::string asked = ToBytes(memories);
    {
      const std::lock_guard lock(mutex_);
      if (asked == opened_by_others_) return absl::OkStatus();
    }
    TANDEM_RETURN_IF_ERROR(thread_->Run({}, [&] {
      ranks_->Announce(kOpenMemoryCommand, /*request_id=*/"", memories);
      return ranks_->Agree(absl::OkStatus());
    }));
    const std::lock_guard lock(mutex_);
    opened_by_others_ = std::move(asked);
    return absl::OkStatus();
  }

  // Gives the tensors that this rank has kept to the other ranks, which pack them beside serving.
  // If a commit is repeated they have been given. Errors of SendWeights; the server ends if the
  // transfer breaks.
  absl::Status SendToOtherRanks(SeniorUpdate& update, const CallScope& call) {
    if (update.tensors().empty()) return absl::OkStatus();
    const RankedWeights weights = WeightsToSend(update.tensors(), senior_.shard->model());
    TANDEM_RETURN_IF_ERROR(thread_->Run(call, [&] {
      ranks_->Announce(kWeightsCommand, /*request_id=*/"", weights);
      return absl::OkStatus();
    }));
    absl::Status packed;
    const absl::Status sent = CatchTorchErrors("weights", [&] {
      packed = SendWeights(weights, update.tensors(), *senior_.ranks.weights_group);
      return absl::OkStatus();
    });
    if (!sent.ok()) ranks_->Fail(std::string(sent.message()));
    update.DropTensors();
    return packed;
  }

  // Runs between two passes. The tensors have been checked: other ranks accept what this one does.
  absl::Status SwapWeights(SeniorUpdate& update, const WeightManifest& manifest) {
    generator_->Settle();
    if (update.weights() != nullptr) {
      if (senior_.ranks.sharded()) {
        ranks_->Announce(kAdoptCommand, /*request_id=*/"", AdoptedWeights());
      }
      senior_.shard->model().Adopt(*update.weights());
      senior_.shard->OnNewWeights();
    }
    if (update.speculator() != nullptr) senior_.shard->SwapSpeculator(*update.speculator());
    const WeightsVersion weights = {.version = manifest.version, .digest = manifest.digest};
    generator_->OnSeniorUpdated(weights, options_.on_weight_update);
    scorer_->OnSeniorUpdated(weights);
    Publish();
    return absl::OkStatus();
  }

  const EngineOptions options_;
  const EngineInfo info_;
  const RequestLimits limits_;
  std::atomic<bool> ended_ = false;

  // Used by the engine thread alone, but for the senior (see above).
  const std::shared_ptr<ranks::ServerRanks> ranks_;
  ranks::CommandTable commands_;
  const std::unique_ptr<const TandemModelManager> models_;
  const TandemModelManager::Lane& senior_;
  const TandemModelManager::Lane& junior_;
  std::unique_ptr<Generator> generator_;
  std::unique_ptr<Scorer> scorer_;
  bool paused_ = false;
  // On another rank than 0: an update from its tensors' command on, and the images of passes.
  std::unique_ptr<ShardUpdate> shard_update_;
  std::map<uint64_t, PromptImages> ranked_images_;

  // For the threads of updates: copies from other processes' GPUs, if the senior is on a GPU.
  std::optional<c10::Stream> intake_;
  std::unique_ptr<StagedWeightReceiver> weights_;  // an update's thread uses the senior's model

  mutable std::mutex mutex_;
  EngineStats stats_;
  std::string opened_by_others_;  // the memory that all ranks can open
  int64_t posted_samples_ = 0;    // of prompts that the generator has not taken
  int64_t arrived_samples_ = 0;   // of prompts that it has taken
  QueueDrain drain_;
  PromptId next_id_ = 1;
  int64_t scores_ = 0;
  int64_t score_bytes_ = 0;

  std::unique_ptr<EngineThread> thread_;  // last, as it uses everything above
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options) {
  auto engine = CatchTorchErrors("models", [&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    TANDEM_RETURN_IF_ERROR(CheckOptions(options));
    TANDEM_ASSIGN_OR_RETURN(const EngineRanks ranks, JoinRanks(options));
    ranks::ServerRanks& server = *ranks.server;
    auto models =
        CatchTorchErrors("models", [&] { return TandemModelManager::Load(options, ranks); });
    TANDEM_RETURN_IF_ERROR(server.Agree(models.status()));
    TANDEM_RETURN_IF_ERROR(server.CheckSame("senior.model", (*models)->senior().digest));
    TANDEM_RETURN_IF_ERROR(server.CheckSame("junior.model", (*models)->junior().digest));
    TANDEM_RETURN_IF_ERROR(
        server.CheckSame("tokenizer.json", (*models)->info().senior.vocabulary_digest));
    return std::make_unique<EngineImpl>(options, ranks.server, *std::move(models));
  });
  if (engine.ok()) return engine;
  return NameMemorySettings(engine.status(), kMemorySettings);
}

}  // namespace tandem::rollout
