#include "services/trainer/engine/engine.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/parallel/gpu_copies.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/rank_agreement.h"
#include "common/speculator/speculator_update.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/weight_snapshot.h"
#include "services/trainer/engine/auxiliary/trainer_models.h"
#include "services/trainer/engine/steps/batch_check.h"
#include "services/trainer/engine/steps/policy_step.h"
#include "services/trainer/engine/steps/row_passes.h"
#include "services/trainer/engine/steps/supervised_step.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {
namespace {

// While one lives, its thread computes with half of its threads. A copy of the weights is bound by
// the memory's bandwidth; with all threads it would hold up a rollout server on the same cores for
// a dozen decode passes (ADR 126).
class HalfOfThreads {
 public:
  HalfOfThreads() { at::set_num_threads(std::max(threads_ / 2, 1)); }
  ~HalfOfThreads() { at::set_num_threads(threads_); }
  HalfOfThreads(const HalfOfThreads&) = delete;
  HalfOfThreads& operator=(const HalfOfThreads&) = delete;

 private:
  const int threads_ = at::get_num_threads();
};

class TorchEngine final : public training::CoreEngine<Engine> {
 public:
  TorchEngine(const EngineOptions& options, std::unique_ptr<training::TrainingCore> core,
              std::shared_ptr<CriticConnection> critic)
      : CoreEngine(std::move(core)), options_(options), critic_(std::move(critic)) {
    AddCommands();
  }
  // Commands use the members.
  ~TorchEngine() override { core_->Shutdown(); }

  // Loads the models beside the one in training.
  absl::Status Load() {
    TANDEM_RETURN_IF_ERROR(core_->OnAllRanks("model", [&]() -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(TrainerModels models, LoadTrainerModels(options_, *core_));
      models_.emplace(std::move(models));
      gpu_copies_.emplace(core_->strategy(), options_.weights_copy_bytes);
      return absl::OkStatus();
    }));
    if (HasSpeculator()) {
      const std::string digest = speculator::ManifestOf(models_->speculator->speculator()).digest;
      TANDEM_RETURN_IF_ERROR(core_->CheckSameOnAllRanks("speculator", digest));
    }
    core_->Start();
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                       const TrainStepRequest& request) override {
    return train_step_(call, request);
  }
  absl::StatusOr<LogProbsResults> ComputeLogProbs(const CallScope& call,
                                                  const LogProbsBatch& batch) override {
    return compute_log_probs_(call, batch);
  }
  absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(
      const CallScope& call, const SnapshotRequest& request) override {
    return take_snapshot_(call, request);
  }

 private:
  using SnapshotResult = absl::StatusOr<std::shared_ptr<const WeightSource>>;

  void AddCommands();
  absl::StatusOr<StepResult> DoStep(const CallScope& call, const TrainStepRequest& request);
  SnapshotResult TakeSnapshot(const SnapshotRequest& request);
  // Once, on rank 0.
  void SayThatNoGpuHasTheCopy(const absl::Status& why);
  bool HasSpeculator() const { return models_->speculator != nullptr; }
  BatchLimits Limits() const;

  const EngineOptions options_;
  const std::shared_ptr<CriticConnection> critic_;
  std::optional<TrainerModels> models_;            // from Load on
  std::weak_ptr<const WeightSource> snapshot_;     // the last snapshot, while a caller holds it
  std::optional<parallel::GpuCopies> gpu_copies_;  // from Load on
  bool said_no_gpu_has_the_copy_ = false;
  training::TrainingCore::Command<TrainStepRequest, absl::StatusOr<StepResult>> train_step_;
  training::TrainingCore::Command<LogProbsBatch, absl::StatusOr<LogProbsResults>>
      compute_log_probs_;
  training::TrainingCore::Command<SnapshotRequest, SnapshotResult> take_snapshot_;
};

void TorchEngine::AddCommands() {
  train_step_ = core_->AddCommand<TrainStepRequest, absl::StatusOr<StepResult>>(
      "train step",
      [this](const CallScope& call, const auto& request) { return DoStep(call, request); },
      training::TrainingCore::Needs::kWeights);
  compute_log_probs_ = core_->AddCommand<LogProbsBatch, absl::StatusOr<LogProbsResults>>(
      "log-probabilities", [this](const CallScope&, const auto& batch) {
        return trainer::ComputeLogProbs(*models_, batch);
      });
  take_snapshot_ = core_->AddCommand<SnapshotRequest, SnapshotResult>(
      "weight snapshot",
      [this](const CallScope&, const auto& request) { return TakeSnapshot(request); });
}

BatchLimits TorchEngine::Limits() const {
  return {.sequence = core_->limits(),
          .max_samples = options_.max_samples,
          .version = core_->state().version,
          .lineage = &core_->state().lineage,
          .support = {.critic = critic_ != nullptr,
                      .reference = models_->has_reference(),
                      .junior = models_->junior != nullptr,
                      .teacher = models_->teacher != nullptr,
                      .frozen = core_->frozen()},
          .routing = core_->model().config().RoutingLayout()};
}

absl::StatusOr<StepResult> TorchEngine::DoStep(const CallScope& call,
                                               const TrainStepRequest& request) {
  if (core_->frozen() && request.optimizer != OptimizerOverrides()) {
    return InvalidField("optimizer", "the model, which it would update, is frozen");
  }
  if (const auto* supervised = std::get_if<SupervisedBatch>(&request.batch)) {
    SupervisedStep step(*models_, Limits(), *supervised, request.blobs);
    return core_->Step(
        request, [&](StepReport& report) { return step.Prepare(report); }, request.optimizer);
  }
  PolicyStep step(*models_, critic_.get(), Limits(), request, std::get<PolicyBatch>(request.batch));
  TANDEM_ASSIGN_OR_RETURN(
      StepResult result,
      core_->Step(
          request, [&](StepReport& report) { return step.Prepare(call, report); },
          request.optimizer));
  result.critic_seconds = step.critic_seconds();
  return result;
}

TorchEngine::SnapshotResult TorchEngine::TakeSnapshot(const SnapshotRequest& request) {
  const WeightsVersion weights = core_->weights();
  parallel::Strategy& strategy = core_->strategy();
  const Model& model = core_->model();
  const auto is_sent = [&](const Parameter& parameter) { return model.IsSent(parameter.spec); };
  std::vector<WeightSpec> tensors = InWantedTypes(model.SentSpecs(), request.receivers);
  NamedTensors heads;
  if (HasSpeculator()) heads = speculator::WeightsToSend(models_->speculator->speculator());
  for (const auto& [name, tensor] : heads) {
    tensors.push_back({.name = name, .shape = tensor.sizes().vec()});
  }
  // Null on other ranks, which publish nothing.
  std::shared_ptr<const WeightSource> snapshot = snapshot_.lock();
  std::vector<ComponentManifest> components;  // on rank 0, which sends them: all ranks have them
  TANDEM_ASSIGN_OR_RETURN(
      const bool held, ranks::FromRankZero<bool>(strategy.ranks(), [&] {
        if (HasSpeculator()) {
          components = {speculator::ManifestOf(models_->speculator->speculator())};
        }
        return absl::StatusOr<bool>(snapshot != nullptr &&
                                    snapshot->manifest().version == weights.version &&
                                    snapshot->manifest().digest == weights.digest &&
                                    snapshot->manifest().components == components &&
                                    snapshot->manifest().tensors == tensors);
      }));
  if (held) return snapshot;
  snapshot = nullptr;  // releases its file or memory for the next one
  const HalfOfThreads half;
  WeightManifest manifest = ManifestOf(std::move(tensors), weights, model.num_token_ids(),
                                       std::move(components), model.lora().Text());
  if (request.on_gpu && CanShareMemory(model.device())) {
    const absl::Status reserved = gpu_copies_->Reserve(manifest.tensors);
    if (reserved.ok()) {
      TANDEM_ASSIGN_OR_RETURN(snapshot, gpu_copies_->Fill(std::move(manifest), heads));
      snapshot_ = snapshot;
      return snapshot;
    }
    SayThatNoGpuHasTheCopy(reserved);
  }
  TANDEM_RETURN_IF_ERROR(
      parallel::UseWholeParameters(strategy, is_sent, [&](TensorSource parameters) -> absl::Status {
        const auto all = [&](TensorVisitor visit) -> absl::Status {
          TANDEM_RETURN_IF_ERROR(parameters(visit));
          return SourceOf(heads)(visit);
        };
        TANDEM_ASSIGN_OR_RETURN(snapshot, MakeWeightSnapshot(std::move(manifest), all));
        return absl::OkStatus();
      }));
  snapshot_ = snapshot;
  return snapshot;
}

void TorchEngine::SayThatNoGpuHasTheCopy(const absl::Status& why) {
  if (core_->strategy().ranks().rank() != 0 || std::exchange(said_no_gpu_has_the_copy_, true)) {
    return;
  }
  Log(LogLevel::kWarning, "weights_not_copied_on_gpu",
      {{"message", why.message()}, {"instead", "a file"}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic) {
  if (options.freeze_base_model && options.speculator.adapter.empty()) {
    return InvalidField("speculator.adapter", "is required by freeze_base_model");
  }
  EngineOptions core_options = options;
  core_options.strategy.outputs_read_images = !options.reference_model.empty() ||
                                              !options.junior_model.empty() ||
                                              !options.teacher_model.empty();
  TANDEM_ASSIGN_OR_RETURN(
      std::unique_ptr<training::TrainingCore> core,
      training::TrainingCore::Create(
          "trainer", "policy/", core_options,
          {.head = HeadKind::kLm, .requires_grad = true, .freeze_all = options.freeze_base_model}));
  auto engine = std::make_unique<TorchEngine>(options, std::move(core), std::move(critic));
  TANDEM_RETURN_IF_ERROR(engine->Load());
  return engine;
}

}  // namespace tandem::trainer
