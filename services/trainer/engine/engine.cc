#include "services/trainer/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/loss/linear_cross_entropy.h"
#include "common/loss/supervised_loss.h"
#include "common/model/model.h"
#include "common/parallel/rank_agreement.h"
#include "common/parallel/whole_parameters.h"
#include "common/tandem/tandem_config.h"
#include "common/tandem/vocabulary.h"
#include "common/training/sequence_check.h"
#include "common/training/weight_snapshot.h"
#include "services/trainer/engine/batch_check.h"
#include "services/trainer/engine/junior_kl.h"
#include "services/trainer/engine/rollout_correction.h"
#include "services/trainer/engine/step_metrics.h"
#include "services/trainer/engine/training_rows.h"
#include "services/training/training_core.h"

namespace tandem::trainer {
namespace {

constexpr char kSkipReason[] =
    "no token of the batch has weight: every response token was written by the junior, with "
    "junior_token_loss_weight 0, or is of a response that was cut by length, with "
    "mask_truncated_completions";

constexpr char kRejectedSkipReason[] =
    "every token with a weight was rejected: old_logprobs and behaviour are too far apart for "
    "rejection_upper and rejection_lower";

constexpr char kStaleSkipReason[] =
    "every sample is older than max_staleness allows, and stale_samples drops those";

// The rows of one micro-batch as the fused loss takes them; `temperatures` are those of all rows,
// of which `first_row` is the first.
loss::OutputRows MakeOutputRows(const training::MicroBatchInput& input, size_t first_row,
                                const std::vector<double>& temperatures) {
  loss::OutputRows rows = {.positions = input.positions, .labels = input.labels};
  const auto begin = temperatures.begin() + static_cast<int64_t>(first_row);
  const auto end = begin + static_cast<int64_t>(input.positions.size());
  if (std::any_of(begin, end, [](double t) { return t != 1.0; })) {
    rows.temperatures.assign(begin, end);
  }
  return rows;
}

// The loss of an update, micro-batch by micro-batch; rows are those of the step.
struct UpdateLoss {
  std::function<loss::TokenLoss> evaluate;
  loss::LossMode mode = loss::LossMode::kAuto;
  // What is added to the gradients of the hidden states; may be empty.
  std::function<absl::Status(const training::MicroBatchInput&, const at::Tensor& hidden,
                             loss::OutputGradients&)>
      add = nullptr;
};

// What the updates of a policy step share.
struct PolicyWork {
  PolicyObjective objective;
  TrainingRows rows;
  std::vector<size_t> first_rows, first_junior_rows;  // of each sequence
  // Of the updates so far.
  std::optional<loss::PolicyLossEvaluator> evaluator;
  JuniorKlSums junior_kl;
  int64_t updates = 0;
};

bool HasRows(const PolicyWork& work, const training::MiniBatch& range) {
  const auto count = [&](const std::vector<size_t>& first) {
    return first.size() == 1 ? 0 : first[range.end] - first[range.begin];
  };
  return count(work.first_rows) + count(work.first_junior_rows) > 0;
}

using Updates = std::vector<training::TrainingCore::UpdateGradients>;

class TorchEngine final : public training::CoreEngine<Engine> {
 public:
  TorchEngine(const EngineOptions& options, std::unique_ptr<training::TrainingCore> core,
              std::shared_ptr<CriticConnection> critic)
      : CoreEngine(std::move(core)), options_(options), critic_(std::move(critic)) {
    AddCommands();
  }
  // Commands use what goes next.
  ~TorchEngine() override { core_->Shutdown(); }

  // Loads what there is beside the model itself.
  absl::Status Load() {
    TANDEM_RETURN_IF_ERROR(core_->Together("model", [&] { return LoadRest(); }));
    core_->Start();
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                       const TrainStepRequest& request) override {
    return train_step_(call, request);
  }
  absl::StatusOr<LogProbsResult> ComputeLogProbs(const CallScope& call,
                                                 const LogProbsRequest& request) override {
    return compute_log_probs_(call, request);
  }
  absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(const CallScope& call) override {
    return snapshot_command_(call, {});
  }

 private:
  using NoRequest = training::TrainingCore::NoRequest;
  using SnapshotResult = absl::StatusOr<std::shared_ptr<const WeightSource>>;

  void AddCommands();
  absl::StatusOr<StepResult> DoStep(const CallScope& call, const TrainStepRequest& request);
  absl::StatusOr<LogProbsResult> LogProbs(const LogProbsRequest& request);
  SnapshotResult TakeSnapshot();
  absl::Status LoadRest();
  // A frozen model beside the one that is trained; null for an empty path.
  absl::StatusOr<std::unique_ptr<Model>> LoadFrozen(const char* field, const std::string& path);
  absl::StatusOr<std::unique_ptr<loss::FusedOutputLoss>> MakeLoss(
      const parallel::OutputShard& output) const;
  BatchLimits Limits() const;
  absl::StatusOr<Updates> PolicyStep(const CallScope& call, const TrainStepRequest& request,
                                     const PolicyBatch& batch, StepReport& report);
  absl::StatusOr<Updates> LearnPolicy(const CallScope& call, const TrainStepRequest& request,
                                      const PolicyBatch& batch, StepReport& report);
  absl::StatusOr<Updates> SupervisedStep(const SupervisedBatch& batch, StepReport& report);
  // What the models of the trainer say of the rows before the first update.
  absl::Status AddLogProbs(const PolicyObjective& objective, TrainingRows& rows);
  // Of the model that is trained, or of the reference.
  absl::StatusOr<std::vector<double>> RowLogProbs(const TrainingRows& rows, bool of_reference);
  absl::StatusOr<Advantages> AdvantagesOf(const CallScope& call, const TrainStepRequest& request,
                                          const PolicyBatch& batch, const TokenNumbers& penalties,
                                          Metrics& metrics);
  absl::Status PolicyUpdate(PolicyWork& work, const training::MiniBatch& range, StepReport& report);
  // Forward and backward over the rows of some sequences, the first of which is `first_row`.
  absl::Status AddGradients(absl::Span<const training::SequenceRows> sequences, size_t first_row,
                            const std::vector<double>& temperatures, const UpdateLoss& update_loss,
                            StepReport& report);

  const EngineOptions options_;
  const std::shared_ptr<CriticConnection> critic_;
  std::unique_ptr<Model> reference_;
  std::unique_ptr<loss::FusedOutputLoss> loss_, reference_loss_;
  std::unique_ptr<JuniorKl> junior_kl_;
  std::unique_ptr<BoundarySets> boundaries_;
  std::weak_ptr<const WeightSource> snapshot_;  // the last one, while somebody holds it
  training::TrainingCore::Command<TrainStepRequest, absl::StatusOr<StepResult>> train_step_;
  training::TrainingCore::Command<LogProbsRequest, absl::StatusOr<LogProbsResult>>
      compute_log_probs_;
  training::TrainingCore::Command<NoRequest, SnapshotResult> snapshot_command_;
};

void TorchEngine::AddCommands() {
  train_step_ = core_->AddCommand<TrainStepRequest, absl::StatusOr<StepResult>>(
      "train step",
      [this](const CallScope& call, const auto& request) { return DoStep(call, request); });
  compute_log_probs_ = core_->AddCommand<LogProbsRequest, absl::StatusOr<LogProbsResult>>(
      "log-probabilities",
      [this](const CallScope&, const auto& request) { return LogProbs(request); });
  snapshot_command_ = core_->AddCommand<NoRequest, SnapshotResult>(
      "weight snapshot", [this](const CallScope&, const NoRequest&) { return TakeSnapshot(); });
}

absl::Status TorchEngine::LoadRest() {
  const Model& model = core_->model();
  const parallel::OutputShard output = core_->strategy().output_shard();
  if (core_->strategy().computes_output()) {
    TANDEM_ASSIGN_OR_RETURN(loss_, MakeLoss(output));
  }

  TANDEM_ASSIGN_OR_RETURN(reference_, LoadFrozen("reference_model", options_.reference_model));
  if (reference_ != nullptr) {
    TANDEM_ASSIGN_OR_RETURN(
        reference_loss_,
        MakeLoss({.weight = reference_->lm_head().compute_weight(), .group = nullptr}));
  }
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Model> junior,
                          LoadFrozen("junior_model", options_.junior_model));
  TANDEM_ASSIGN_OR_RETURN(
      junior_kl_,
      JuniorKl::Create(output, std::move(junior), loss_.get(),
                       LogitsChunkBytes(options_.logits_chunk_bytes, model.config().vocab_size)));

  if (core_->vocabulary() != nullptr) {
    const std::vector<int64_t>& eos = model.config().eos_token_ids;
    boundaries_ = std::make_unique<BoundarySets>(*core_->vocabulary(),
                                                 std::vector<int32_t>(eos.begin(), eos.end()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> TorchEngine::LoadFrozen(const char* field,
                                                               const std::string& path) {
  if (path.empty()) return nullptr;
  const Model& model = core_->model();
  absl::StatusOr<std::unique_ptr<Model>> frozen =
      Model::Load(path, {.placement = {.device = model.device(), .dtype = model.dtype()}});
  if (!frozen.ok()) return PrependFieldPath(field, frozen.status());
  if ((*frozen)->config().vocab_size != model.config().vocab_size) {
    return InvalidField(field, "has another vocabulary than the model");
  }
  return frozen;
}

absl::StatusOr<std::unique_ptr<loss::FusedOutputLoss>> TorchEngine::MakeLoss(
    const parallel::OutputShard& output) const {
  absl::StatusOr<loss::LossImpl> impl = loss::ParseLossImpl(options_.loss_impl);
  if (!impl.ok()) return PrependFieldPath("batch.loss_impl", impl.status());
  TANDEM_ASSIGN_OR_RETURN(
      std::unique_ptr<loss::LinearCrossEntropyLoss> made,
      loss::LinearCrossEntropyLoss::Create(output.weight, {},
                                           {.impl = *impl,
                                            .logits_chunk_bytes = LogitsChunkBytes(
                                                options_.logits_chunk_bytes, output.weight.size(0)),
                                            .group = output.group}));
  Log(made->is_fallback() ? LogLevel::kWarning : LogLevel::kInfo, "fused_output_loss",
      {{"impl", loss::LossImplName(made->impl())}, {"reason", made->reason()}});
  return made;
}

BatchLimits TorchEngine::Limits() const {
  return {.sequence = core_->limits(),
          .max_samples = options_.max_samples,
          .version = core_->state().version,
          .lineage = &core_->state().lineage,
          .support = {.critic = critic_ != nullptr,
                      .reference = reference_ != nullptr,
                      .junior = junior_kl_->has_junior()}};
}

absl::StatusOr<StepResult> TorchEngine::DoStep(const CallScope& call,
                                               const TrainStepRequest& request) {
  return core_->Step(request, [&](StepReport& report) {
    const auto* policy = std::get_if<PolicyBatch>(&request.batch);
    return policy != nullptr ? PolicyStep(call, request, *policy, report)
                             : SupervisedStep(std::get<SupervisedBatch>(request.batch), report);
  });
}

absl::StatusOr<Advantages> TorchEngine::AdvantagesOf(const CallScope& call,
                                                     const TrainStepRequest& request,
                                                     const PolicyBatch& batch,
                                                     const TokenNumbers& penalties,
                                                     Metrics& metrics) {
  if (batch.objective.advantage_estimator != AdvantageEstimator::kGae) {
    return PolicyAdvantages(batch, nullptr, penalties);
  }
  const CriticConnection::Call critic_call{.scope = call,
                                           .progress = [this] { core_->NoteProgress(); }};
  CriticConnection::TrainRequest train;
  train.step = {.run_id = request.run_id, .step = request.step, .request_id = request.request_id};
  for (const PolicySample& sample : batch.samples) {
    train.sequences.push_back(
        {sample.trajectory.prompt_token_ids, sample.trajectory.response_token_ids});
    if (SkipsJuniorTokens(batch.objective)) {
      train.loss_masks.push_back(sample.trajectory.authorship_mask);
    }
  }
  TANDEM_ASSIGN_OR_RETURN(CriticConnection::Values values,
                          core_->FromRankZero<CriticConnection::Values>([&] {
                            return critic_->ComputeValues(critic_call, train.step, train.sequences);
                          }));
  TANDEM_ASSIGN_OR_RETURN(Advantages advantages, PolicyAdvantages(batch, &values, penalties));
  train.expected_version = values.weights.version;
  train.value_clip = batch.objective.value_clip;
  train.updates = batch.objective.updates;
  train.old_values = std::move(values.values);
  train.returns = advantages.returns;
  TANDEM_ASSIGN_OR_RETURN(const Metrics critic_metrics, core_->FromRankZero<Metrics>([&] {
    return critic_->TrainStep(critic_call, train);
  }));
  metrics.insert(critic_metrics.begin(), critic_metrics.end());
  return advantages;
}

absl::StatusOr<Updates> TorchEngine::PolicyStep(const CallScope& call,
                                                const TrainStepRequest& request,
                                                const PolicyBatch& batch, StepReport& report) {
  const BatchLimits limits = Limits();
  TANDEM_RETURN_IF_ERROR(CheckPolicyBatch(batch, limits));
  report.metrics["policy/dropped_samples"] = 0;
  if (batch.objective.stale_samples == StaleSamples::kRefuse) {
    return LearnPolicy(call, request, batch, report);
  }
  const PolicyBatch kept = WithoutStale(batch, limits);
  report.metrics["policy/dropped_samples"] =
      static_cast<double>(batch.samples.size() - kept.samples.size());
  if (kept.samples.empty()) {
    report.skipped = true;
    report.skip_reason = kStaleSkipReason;
    return Updates{};
  }
  return LearnPolicy(call, request, kept, report);
}

absl::StatusOr<Updates> TorchEngine::LearnPolicy(const CallScope& call,
                                                 const TrainStepRequest& request,
                                                 const PolicyBatch& batch, StepReport& report) {
  const PolicyObjective& objective = batch.objective;
  absl::StatusOr<loss::LossScales> scales = PolicyScales(batch);
  if (!scales.ok()) return PrependFieldPath("policy", scales.status());
  AddBatchMetrics(batch, boundaries_ == nullptr ? nullptr : &boundaries_->sentence(),
                  report.metrics);
  const auto work = std::make_shared<PolicyWork>();
  work->objective = objective;
  TrainingRows& rows = work->rows = PolicyRows(batch, *scales);
  if (scales->total_weight == 0 && rows.junior.scales.empty()) {
    report.skipped = true;
    report.skip_reason = kSkipReason;
    return Updates{};
  }
  TANDEM_RETURN_IF_ERROR(AddLogProbs(objective, rows));
  TANDEM_RETURN_IF_ERROR(CorrectForRollout(batch, rows, report.metrics));
  if (rows.tokens.scales.empty() && rows.junior.scales.empty()) {
    report.skipped = true;
    report.skip_reason = kRejectedSkipReason;
    return Updates{};
  }
  TokenNumbers penalties;
  if (PenalisesReward(objective)) {
    std::vector<double> kl = ReferenceKl(objective, rows.tokens);
    AddRewardKlMetrics(kl, batch, report.metrics);
    for (double& x : kl) x *= objective.loss.kl_coefficient;
    penalties = OfTokens(kl, batch, rows);
  }
  TANDEM_ASSIGN_OR_RETURN(const Advantages advantages,
                          AdvantagesOf(call, request, batch, penalties, report.metrics));
  rows.tokens.advantages = OfRows(advantages.advantages, batch, rows);

  loss::PolicyLossOptions options = objective.loss;
  if (!HasReferenceKl(objective) || PenalisesReward(objective)) {
    options.kl_estimator = loss::KlEstimator::kNone;
  }
  TANDEM_ASSIGN_OR_RETURN(loss::PolicyLossEvaluator evaluator,
                          loss::PolicyLossEvaluator::Create(options, rows.tokens));
  work->evaluator.emplace(std::move(evaluator));
  work->first_rows = training::FirstRows(rows.sequences);
  work->first_junior_rows = training::FirstRows(rows.junior.sequences);

  Updates updates;
  for (int64_t epoch = 0; epoch < objective.updates.num_epochs; ++epoch) {
    for (const training::MiniBatch& range : MiniBatches(batch)) {
      if (!HasRows(*work, range)) continue;
      updates.emplace_back(
          [this, work, range](StepReport& r) { return PolicyUpdate(*work, range, r); });
    }
  }
  return updates;
}

absl::Status TorchEngine::AddLogProbs(const PolicyObjective& objective, TrainingRows& rows) {
  // Otherwise they are the log-probs that the update itself computes.
  const bool several = objective.updates.num_mini_batches * objective.updates.num_epochs > 1;
  const bool before = several || PenalisesReward(objective) || RejectsTokens(objective) ||
                      objective.importance_sampling_batch_normalize;
  if (objective.old_logprobs == OldLogprobs::kRecomputed && before) {
    TANDEM_ASSIGN_OR_RETURN(rows.tokens.old_logprobs, RowLogProbs(rows, /*of_reference=*/false));
  }
  if (HasReferenceKl(objective) && objective.reference_logprobs == ReferenceLogprobs::kModel) {
    TANDEM_ASSIGN_OR_RETURN(rows.tokens.reference, RowLogProbs(rows, /*of_reference=*/true));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> TorchEngine::RowLogProbs(const TrainingRows& rows,
                                                             bool of_reference) {
  loss::FusedOutputLoss& loss = of_reference ? *reference_loss_ : *loss_;
  const auto logprobs = [&](const training::MicroBatchInput& input,
                            const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
    TANDEM_ASSIGN_OR_RETURN(
        loss::RowLogProbs values,
        loss.LogProbs(hidden, MakeOutputRows(input, input.first_row, rows.temperatures)));
    return std::move(values.logprobs);
  };
  return of_reference ? core_->ForwardFrozen(*reference_, rows.sequences, logprobs)
                      : core_->Forward(rows.sequences, logprobs);
}

absl::Status TorchEngine::PolicyUpdate(PolicyWork& work, const training::MiniBatch& range,
                                       StepReport& report) {
  // Copies: an update that is left out reports nothing.
  loss::PolicyLossEvaluator evaluator = *work.evaluator;
  JuniorKlSums junior_kl = work.junior_kl;
  UpdateLoss update_loss = {
      .evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
      // A micro-batch holds whole sequences.
      .mode = evaluator.needs_sequences() ? loss::LossMode::kRecompute : loss::LossMode::kAuto};
  if (!work.rows.junior.sequences.empty()) {
    update_loss.add = [&](const training::MicroBatchInput& input, const at::Tensor& hidden,
                          loss::OutputGradients& gradients) {
      const training::MicroBatchInput own = training::SelectRows(
          input.batch,
          input.sequences.Of(range.Of<training::SequenceRows>(work.rows.junior.sequences)));
      return junior_kl_->AddGradients(own, hidden, work.rows.junior,
                                      work.first_junior_rows[range.begin + input.sequences.begin],
                                      work.objective.junior_kl_kind, gradients, junior_kl);
    };
  }
  TANDEM_RETURN_IF_ERROR(AddGradients(range.Of<training::SequenceRows>(work.rows.sequences),
                                      work.first_rows[range.begin], work.rows.temperatures,
                                      update_loss, report));
  // What all ranks have seen is reported; what this one has is kept.
  loss::PolicyLossEvaluator all = evaluator;
  JuniorKlSums all_junior_kl = junior_kl;
  TANDEM_RETURN_IF_ERROR(all.Reduce(core_->reduction()));
  if (update_loss.add != nullptr) {
    TANDEM_RETURN_IF_ERROR(all_junior_kl.Reduce(core_->reduction()));
  }
  work.evaluator = std::move(evaluator);
  work.junior_kl = junior_kl;
  ++work.updates;
  AddPolicyMetrics(all.Metrics(), work.updates, report.metrics);
  if (update_loss.add != nullptr) {
    AddJuniorKlMetrics(all_junior_kl, work.updates, report.metrics);
  }
  return absl::OkStatus();
}

absl::StatusOr<Updates> TorchEngine::SupervisedStep(const SupervisedBatch& batch,
                                                    StepReport& report) {
  TANDEM_RETURN_IF_ERROR(CheckSupervisedBatch(batch, Limits()));
  absl::StatusOr<loss::LossScales> scales = SupervisedScales(batch);
  if (!scales.ok()) return PrependFieldPath("supervised", scales.status());
  AddBatchMetrics(batch, report.metrics);
  const auto rows = std::make_shared<const TrainingRows>(SupervisedRows(batch, *scales));
  return Updates{[this, rows](StepReport& r) -> absl::Status {
    loss::SupervisedLossEvaluator evaluator(rows->tokens.scales);
    TANDEM_RETURN_IF_ERROR(AddGradients(
        rows->sequences, 0, rows->temperatures,
        {.evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); }}, r));
    TANDEM_RETURN_IF_ERROR(evaluator.Reduce(core_->reduction()));
    r.metrics["loss/total"] = evaluator.loss();
    r.metrics["policy/entropy"] = evaluator.mean_entropy();
    r.metrics["policy/weighted_tokens"] = static_cast<double>(evaluator.tokens());
    return absl::OkStatus();
  }};
}

absl::Status TorchEngine::AddGradients(absl::Span<const training::SequenceRows> sequences,
                                       size_t first_row, const std::vector<double>& temperatures,
                                       const UpdateLoss& update_loss, StepReport& report) {
  TANDEM_ASSIGN_OR_RETURN(
      const int64_t micro_batches,
      core_->ForwardBackward(
          sequences,
          [&](const training::MicroBatchInput& input,
              const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
            const size_t own_row = first_row + input.first_row;
            // Undefined where a freeze leaves nothing to train.
            loss::OutputGradients gradients = {
                .hidden = hidden.requires_grad() ? at::zeros_like(hidden.detach(), at::kFloat)
                                                 : at::Tensor(),
                .weight = core_->strategy().Gradient(core_->model().lm_head_name()),
                .bias = {}};
            TANDEM_RETURN_IF_ERROR(loss_->ForwardBackward(
                hidden.detach(), MakeOutputRows(input, own_row, temperatures),
                [&](int64_t row, auto... arguments) {
                  return update_loss.evaluate(static_cast<int64_t>(own_row) + row, arguments...);
                },
                gradients, update_loss.mode));
            if (update_loss.add != nullptr) {
              TANDEM_RETURN_IF_ERROR(update_loss.add(input, hidden.detach(), gradients));
            }
            return hidden.requires_grad() ? gradients.hidden.to(hidden.scalar_type())
                                          : at::Tensor();
          }));
  report.metrics["policy/micro_batches"] = static_cast<double>(micro_batches);
  return absl::OkStatus();
}

absl::StatusOr<LogProbsResult> TorchEngine::LogProbs(const LogProbsRequest& request) {
  TANDEM_RETURN_IF_ERROR(training::CheckSequence(request.prompt_token_ids,
                                                 request.response_token_ids, core_->limits()));
  TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", request.temperature, 0));
  TANDEM_RETURN_IF_ERROR(
      Validate(SamplingParams{.temperature = request.temperature}, core_->limits().vocab_size));
  LogProbsResult result{.logprobs = {}, .entropies = {}, .weights = core_->weights()};
  const std::vector<double> temperatures(request.response_token_ids.size(), request.temperature);
  // Log-probabilities, then entropies: every rank gets both.
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> numbers,
      core_->Forward(
          {training::SelectSequenceRows(request.prompt_token_ids, request.response_token_ids,
                                        [](size_t) { return true; })},
          [&](const training::MicroBatchInput& input,
              const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
            TANDEM_ASSIGN_OR_RETURN(
                loss::RowLogProbs values,
                loss_->LogProbs(hidden, MakeOutputRows(input, 0, temperatures)));
            values.logprobs.insert(values.logprobs.end(), values.entropies.begin(),
                                   values.entropies.end());
            return std::move(values.logprobs);
          }));
  const auto middle = numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
  result.logprobs.assign(numbers.begin(), middle);
  result.entropies.assign(middle, numbers.end());
  return result;
}

TorchEngine::SnapshotResult TorchEngine::TakeSnapshot() {
  const WeightsVersion weights = core_->weights();
  parallel::Strategy& strategy = core_->strategy();
  std::shared_ptr<const WeightSource> snapshot = snapshot_.lock();  // of rank 0, which publishes
  TANDEM_ASSIGN_OR_RETURN(
      const bool held, parallel::FromRankZero<bool>(strategy.ranks(), [&] {
        return absl::StatusOr<bool>(snapshot != nullptr &&
                                    snapshot->manifest().version == weights.version &&
                                    snapshot->manifest().digest == weights.digest);
      }));
  if (held) return snapshot;
  snapshot = nullptr;  // its file may be used again
  TANDEM_RETURN_IF_ERROR(
      parallel::UseWholeParameters(strategy, [&](TensorSource parameters) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(
            snapshot, training::MakeWeightSnapshot(core_->model().WeightSpecs(DType::kFloat32),
                                                   parameters, weights));
        return absl::OkStatus();
      }));
  snapshot_ = snapshot;
  return snapshot;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic) {
  TANDEM_ASSIGN_OR_RETURN(
      std::unique_ptr<training::TrainingCore> core,
      training::TrainingCore::Create("trainer", "policy/", options,
                                     {.head = HeadKind::kLm, .requires_grad = true}));
  auto engine = std::make_unique<TorchEngine>(options, std::move(core), std::move(critic));
  TANDEM_RETURN_IF_ERROR(engine->Load());
  return engine;
}

}  // namespace tandem::trainer
