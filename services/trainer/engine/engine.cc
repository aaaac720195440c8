#include "services/trainer/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <iterator>
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
#include "common/tandem/tandem_config.h"
#include "common/tandem/vocabulary.h"
#include "common/training/sequence_check.h"
#include "common/training/weight_snapshot.h"
#include "services/trainer/engine/batch_check.h"
#include "services/trainer/engine/step_metrics.h"
#include "services/trainer/engine/training_rows.h"
#include "services/training/training_core.h"

namespace tandem::trainer {
namespace {

constexpr char kSkipReason[] =
    "no token of the batch has weight: every response token was written by the junior, with "
    "junior_token_loss_weight 0, or is of a response that was cut by length, with "
    "mask_truncated_completions";

constexpr char kStaleSkipReason[] =
    "every sample is older than max_staleness allows, and stale_samples drops those";

// As if its stale samples had not been sent.
PolicyBatch WithoutStale(const PolicyBatch& batch, const BatchLimits& limits) {
  PolicyBatch kept{.objective = batch.objective, .samples = {}};
  std::copy_if(batch.samples.begin(), batch.samples.end(), std::back_inserter(kept.samples),
               [&](const PolicySample& sample) {
                 return !IsStale(sample.trajectory, batch.objective.max_staleness, limits);
               });
  return kept;
}

// The rows of one micro-batch as the fused loss takes them.
loss::OutputRows MakeOutputRows(const training::MicroBatchInput& input,
                                const std::vector<double>& temperatures) {
  loss::OutputRows rows = {.positions = input.positions, .labels = input.labels};
  const auto begin = temperatures.begin() + static_cast<int64_t>(input.first_row);
  const auto end = begin + static_cast<int64_t>(input.positions.size());
  if (std::any_of(begin, end, [](double t) { return t != 1.0; })) {
    rows.temperatures.assign(begin, end);
  }
  return rows;
}

// The loss of a batch, micro-batch by micro-batch; rows are those of the batch.
struct BatchLoss {
  std::function<loss::TokenLoss> evaluate;
  // Before the forward pass; may be empty.
  std::function<absl::Status(const training::MicroBatchInput&, const loss::OutputRows&)> before =
      nullptr;
  loss::LossMode mode = loss::LossMode::kAuto;
};

class TorchEngine final : public training::CoreEngine<Engine> {
 public:
  TorchEngine(const EngineOptions& options, std::unique_ptr<training::TrainingCore> core,
              std::shared_ptr<CriticConnection> critic)
      : CoreEngine(std::move(core)), options_(options), critic_(std::move(critic)) {}

  // Loads what there is beside the model itself.
  absl::Status Load() {
    return core_->Run({}, "model", [&] { return LoadRest(); });
  }

  absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                       const TrainStepRequest& request) override;
  absl::StatusOr<LogProbsResult> ComputeLogProbs(const CallScope& call,
                                                 const LogProbsRequest& request) override;
  absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(const CallScope& call) override;

 private:
  absl::Status LoadRest();
  absl::StatusOr<std::unique_ptr<loss::FusedOutputLoss>> MakeLoss(const Model& model) const;
  BatchLimits Limits() const;
  absl::Status PolicyStep(const CallScope& call, const TrainStepRequest& request,
                          const PolicyBatch& batch, StepReport& report);
  absl::Status LearnPolicy(const CallScope& call, const TrainStepRequest& request,
                           const PolicyBatch& batch, StepReport& report);
  absl::Status SupervisedStep(const SupervisedBatch& batch, StepReport& report);
  absl::StatusOr<Advantages> AdvantagesOf(const CallScope& call, const TrainStepRequest& request,
                                          const PolicyBatch& batch, Metrics& metrics);
  // Forward and backward over all rows.
  absl::Status AddGradients(const TrainingRows& rows, const BatchLoss& batch_loss,
                            StepReport& report);
  absl::Status AddReferenceLogProbs(const training::MicroBatchInput& input,
                                    const loss::OutputRows& rows, std::vector<double>& reference);

  const EngineOptions options_;
  const std::shared_ptr<CriticConnection> critic_;
  std::unique_ptr<Model> reference_;
  std::unique_ptr<loss::FusedOutputLoss> loss_, reference_loss_;
  std::unique_ptr<BoundarySets> boundaries_;
  std::weak_ptr<const WeightSource> snapshot_;  // the last one, while somebody holds it
};

absl::Status TorchEngine::LoadRest() {
  const Model& model = core_->model();
  TANDEM_ASSIGN_OR_RETURN(loss_, MakeLoss(model));

  if (!options_.reference_model.empty()) {
    absl::StatusOr<std::unique_ptr<Model>> reference =
        Model::Load(options_.reference_model,
                    {.placement = {.device = model.device(), .dtype = model.dtype()}});
    if (!reference.ok()) return PrependFieldPath("reference_model", reference.status());
    reference_ = *std::move(reference);
    if (reference_->config().vocab_size != model.config().vocab_size) {
      return InvalidField("reference_model", "has another vocabulary than the model");
    }
    TANDEM_ASSIGN_OR_RETURN(reference_loss_, MakeLoss(*reference_));
  }

  if (core_->vocabulary() != nullptr) {
    const std::vector<int64_t>& eos = model.config().eos_token_ids;
    boundaries_ = std::make_unique<BoundarySets>(*core_->vocabulary(),
                                                 std::vector<int32_t>(eos.begin(), eos.end()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<loss::FusedOutputLoss>> TorchEngine::MakeLoss(
    const Model& model) const {
  absl::StatusOr<loss::LossImpl> impl = loss::ParseLossImpl(options_.loss_impl);
  if (!impl.ok()) return PrependFieldPath("batch.loss_impl", impl.status());
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<loss::LinearCrossEntropyLoss> made,
                          loss::LinearCrossEntropyLoss::Create(
                              model.lm_head().compute_weight(), {},
                              {.impl = *impl, .logits_chunk_bytes = options_.logits_chunk_bytes}));
  Log(made->is_fallback() ? LogLevel::kWarning : LogLevel::kInfo, "fused_output_loss",
      {{"impl", loss::LossImplName(made->impl())}, {"reason", made->reason()}});
  return made;
}

BatchLimits TorchEngine::Limits() const {
  return {.sequence = core_->limits(),
          .max_samples = options_.max_samples,
          .version = core_->state().version,
          .lineage = &core_->state().lineage,
          .support = {.critic = critic_ != nullptr, .reference = reference_ != nullptr}};
}

absl::StatusOr<StepResult> TorchEngine::TrainStep(const CallScope& call,
                                                  const TrainStepRequest& request) {
  return core_->Run(call, "train step", [&] {
    return core_->Step(request, [&](StepReport& report) {
      const auto* policy = std::get_if<PolicyBatch>(&request.batch);
      return policy != nullptr ? PolicyStep(call, request, *policy, report)
                               : SupervisedStep(std::get<SupervisedBatch>(request.batch), report);
    });
  });
}

absl::StatusOr<Advantages> TorchEngine::AdvantagesOf(const CallScope& call,
                                                     const TrainStepRequest& request,
                                                     const PolicyBatch& batch, Metrics& metrics) {
  if (batch.objective.advantage_estimator != AdvantageEstimator::kGae) {
    return PolicyAdvantages(batch, nullptr);
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
                          critic_->ComputeValues(critic_call, train.step, train.sequences));
  TANDEM_ASSIGN_OR_RETURN(Advantages advantages, PolicyAdvantages(batch, &values));
  train.expected_version = values.weights.version;
  train.old_values = std::move(values.values);
  train.returns = advantages.returns;
  TANDEM_ASSIGN_OR_RETURN(const Metrics critic_metrics, critic_->TrainStep(critic_call, train));
  metrics.insert(critic_metrics.begin(), critic_metrics.end());
  return advantages;
}

absl::Status TorchEngine::PolicyStep(const CallScope& call, const TrainStepRequest& request,
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
    return absl::OkStatus();
  }
  return LearnPolicy(call, request, kept, report);
}

absl::Status TorchEngine::LearnPolicy(const CallScope& call, const TrainStepRequest& request,
                                      const PolicyBatch& batch, StepReport& report) {
  absl::StatusOr<loss::LossScales> scales = PolicyScales(batch);
  if (!scales.ok()) return PrependFieldPath("policy", scales.status());
  AddBatchMetrics(batch, boundaries_ == nullptr ? nullptr : &boundaries_->sentence(),
                  report.metrics);
  if (scales->total_weight == 0) {
    report.skipped = true;
    report.skip_reason = kSkipReason;
    return absl::OkStatus();
  }
  TANDEM_ASSIGN_OR_RETURN(const Advantages advantages,
                          AdvantagesOf(call, request, batch, report.metrics));
  TrainingRows rows = PolicyRows(batch, *scales, advantages.advantages);
  loss::PolicyLossOptions options = batch.objective.loss;
  // Without a coefficient the reference model is not even run.
  if (options.kl_coefficient == 0) options.kl_estimator = loss::KlEstimator::kNone;
  const bool with_reference = options.kl_estimator != loss::KlEstimator::kNone;
  if (with_reference) rows.tokens.reference.resize(rows.tokens.scales.size());
  TANDEM_ASSIGN_OR_RETURN(loss::PolicyLossEvaluator evaluator,
                          loss::PolicyLossEvaluator::Create(options, rows.tokens));
  BatchLoss batch_loss = {
      .evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); }};
  if (with_reference) {
    batch_loss.before = [&](const auto& input, const auto& output_rows) {
      return AddReferenceLogProbs(input, output_rows, rows.tokens.reference);
    };
  }
  // A micro-batch holds whole sequences.
  if (evaluator.needs_sequences()) batch_loss.mode = loss::LossMode::kRecompute;
  TANDEM_RETURN_IF_ERROR(AddGradients(rows, batch_loss, report));
  AddPolicyMetrics(evaluator.Metrics(), report.metrics);
  return absl::OkStatus();
}

absl::Status TorchEngine::SupervisedStep(const SupervisedBatch& batch, StepReport& report) {
  TANDEM_RETURN_IF_ERROR(CheckSupervisedBatch(batch, Limits()));
  absl::StatusOr<loss::LossScales> scales = SupervisedScales(batch);
  if (!scales.ok()) return PrependFieldPath("supervised", scales.status());
  AddBatchMetrics(batch, report.metrics);
  const TrainingRows rows = SupervisedRows(batch, *scales);
  loss::SupervisedLossEvaluator evaluator(rows.tokens.scales);
  TANDEM_RETURN_IF_ERROR(AddGradients(
      rows, {.evaluate = [&](auto... arguments) { return evaluator.Evaluate(arguments...); }},
      report));
  report.metrics["loss/total"] = evaluator.loss();
  report.metrics["policy/entropy"] = evaluator.mean_entropy();
  report.metrics["policy/weighted_tokens"] = static_cast<double>(evaluator.tokens());
  return absl::OkStatus();
}

absl::Status TorchEngine::AddGradients(const TrainingRows& rows, const BatchLoss& batch_loss,
                                       StepReport& report) {
  TANDEM_ASSIGN_OR_RETURN(
      const int64_t micro_batches,
      core_->ForwardBackward(
          rows.sequences, [&](const training::MicroBatchInput& input) -> absl::Status {
            const loss::OutputRows output_rows = MakeOutputRows(input, rows.temperatures);
            if (batch_loss.before != nullptr) {
              TANDEM_RETURN_IF_ERROR(batch_loss.before(input, output_rows));
            }
            CausalContext context;
            const at::Tensor hidden = core_->model().HiddenStates(input.batch, context);
            const auto first_row = static_cast<int64_t>(input.first_row);
            // Undefined where a freeze leaves nothing to train.
            loss::OutputGradients gradients = {
                .hidden = hidden.requires_grad() ? at::zeros_like(hidden.detach(), at::kFloat)
                                                 : at::Tensor(),
                .weight = core_->strategy().Gradient(core_->model().lm_head_name()),
                .bias = {}};
            TANDEM_RETURN_IF_ERROR(loss_->ForwardBackward(
                hidden.detach(), output_rows,
                [&](int64_t row, auto... arguments) {
                  return batch_loss.evaluate(first_row + row, arguments...);
                },
                gradients, batch_loss.mode));
            if (hidden.requires_grad()) hidden.backward(gradients.hidden.to(hidden.scalar_type()));
            return absl::OkStatus();
          }));
  report.metrics["policy/micro_batches"] = static_cast<double>(micro_batches);
  return absl::OkStatus();
}

absl::Status TorchEngine::AddReferenceLogProbs(const training::MicroBatchInput& input,
                                               const loss::OutputRows& rows,
                                               std::vector<double>& reference) {
  const at::NoGradGuard no_grad;
  CausalContext context;
  const at::Tensor hidden = reference_->HiddenStates(input.batch, context);
  TANDEM_ASSIGN_OR_RETURN(const loss::RowLogProbs values, reference_loss_->LogProbs(hidden, rows));
  std::copy(values.logprobs.begin(), values.logprobs.end(),
            reference.begin() + static_cast<int64_t>(input.first_row));
  return absl::OkStatus();
}

absl::StatusOr<LogProbsResult> TorchEngine::ComputeLogProbs(const CallScope& call,
                                                            const LogProbsRequest& request) {
  return core_->Run(call, "log-probabilities", [&]() -> absl::StatusOr<LogProbsResult> {
    TANDEM_RETURN_IF_ERROR(training::CheckSequence(request.prompt_token_ids,
                                                   request.response_token_ids, core_->limits()));
    TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", request.temperature, 0));
    TANDEM_RETURN_IF_ERROR(
        Validate(SamplingParams{.temperature = request.temperature}, core_->limits().vocab_size));
    const at::NoGradGuard no_grad;
    const training::MicroBatchInput input = training::MakeMicroBatchInput(
        {training::SelectSequenceRows(request.prompt_token_ids, request.response_token_ids,
                                      [](size_t) { return true; })},
        0, core_->model().device());
    CausalContext context;
    const at::Tensor hidden = core_->model().HiddenStates(input.batch, context);
    TANDEM_ASSIGN_OR_RETURN(
        const loss::RowLogProbs values,
        loss_->LogProbs(hidden,
                        MakeOutputRows(input, std::vector<double>(request.response_token_ids.size(),
                                                                  request.temperature))));
    return LogProbsResult{.logprobs = {values.logprobs.begin(), values.logprobs.end()},
                          .entropies = {values.entropies.begin(), values.entropies.end()},
                          .weights = core_->weights()};
  });
}

absl::StatusOr<std::shared_ptr<const WeightSource>> TorchEngine::Snapshot(const CallScope& call) {
  using Result = absl::StatusOr<std::shared_ptr<const WeightSource>>;
  return core_->Run(call, "weight snapshot", [&]() -> Result {
    const WeightsVersion weights = core_->weights();
    std::shared_ptr<const WeightSource> held = snapshot_.lock();
    if (held != nullptr && held->manifest().version == weights.version &&
        held->manifest().digest == weights.digest) {
      return held;
    }
    TANDEM_ASSIGN_OR_RETURN(const NamedTensors parameters, core_->strategy().GatherParameters());
    TANDEM_ASSIGN_OR_RETURN(std::shared_ptr<const WeightSource> snapshot,
                            training::MakeWeightSnapshot(parameters, weights));
    snapshot_ = snapshot;
    return snapshot;
  });
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
