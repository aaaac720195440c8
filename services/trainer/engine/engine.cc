#include "services/trainer/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/functional/function_ref.h"
#include "common/base/error.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/loss/fused_output_loss.h"
#include "common/loss/supervised_loss.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "common/tandem/vocabulary.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/tensor/weights_digest.h"
#include "common/training/micro_batches.h"
#include "common/training/weight_snapshot.h"
#include "services/trainer/engine/batch_check.h"
#include "services/trainer/engine/step_metrics.h"
#include "services/trainer/engine/step_record.h"
#include "services/trainer/engine/training_rows.h"
#include "services/training/training_checkpoint.h"

namespace tandem::trainer {
namespace {

constexpr char kSkipReason[] =
    "no token of the batch has weight: every response token was written by the junior and "
    "junior_token_loss_weight is 0";

// Rows of one micro-batch.
struct MicroBatchInput {
  RaggedBatch batch;
  loss::OutputRows rows;
  size_t first_row = 0;  // in the global batch
};

MicroBatchInput MakeInput(const TrainingRows& rows, const std::vector<size_t>& first_rows,
                          const training::MicroBatch& range) {
  MicroBatchInput input;
  input.first_row = first_rows[range.begin];
  std::vector<std::vector<int64_t>> sequences;
  std::vector<int64_t>&positions = input.rows.positions, &labels = input.rows.labels;
  int64_t offset = 0;
  for (size_t s = range.begin; s < range.end; ++s) {
    const SequenceRows& sequence = rows.sequences[s];
    if (sequence.input.empty()) continue;
    for (const int64_t position : sequence.positions) positions.push_back(offset + position);
    labels.insert(labels.end(), sequence.labels.begin(), sequence.labels.end());
    sequences.push_back(sequence.input);
    offset += static_cast<int64_t>(sequence.input.size());
  }
  input.batch = MakeRaggedBatch(sequences);
  const auto temperatures = rows.temperatures.begin() + static_cast<int64_t>(input.first_row);
  input.rows.temperatures.assign(temperatures, temperatures + static_cast<int64_t>(labels.size()));
  if (std::all_of(input.rows.temperatures.begin(), input.rows.temperatures.end(),
                  [](double t) { return t == 1.0; })) {
    input.rows.temperatures.clear();
  }
  return input;
}

class TorchEngine : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        std::shared_ptr<CriticConnection> critic);

  EngineInfo Info() const override {
    const std::lock_guard lock(info_mutex_);
    return info_;
  }
  absl::StatusOr<TrainStepResult> TrainStep(const TrainStepRequest& request) override;
  absl::StatusOr<LogProbsResult> ComputeLogProbs(const LogProbsRequest& request) override;
  absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot() override;
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const std::string& directory,
                                                   const std::string& name, int64_t keep) override;
  absl::Status LoadCheckpoint(const std::string& path) override;
  absl::Status ExportModel(const std::string& path, DType dtype) override;

 private:
  explicit TorchEngine(const EngineOptions& options) : options_(options) {}

  BatchLimits Limits() const;
  absl::StatusOr<StepReport> PolicyStep(const TrainStepRequest& request, const PolicyBatch& batch);
  absl::StatusOr<StepReport> SupervisedStep(const SupervisedBatch& batch);
  absl::StatusOr<Advantages> AdvantagesOf(const TrainStepRequest& request, const PolicyBatch& batch,
                                          Metrics& metrics);
  // Forward, backward and update over all rows. `before` runs once a micro-batch, after the
  // forward of the policy and before its loss.
  absl::Status Update(const TrainingRows& rows, loss::TokenLossFunction function,
                      absl::FunctionRef<absl::Status(const MicroBatchInput&)> before,
                      StepReport& report);
  absl::Status AddReferenceLogProbs(const MicroBatchInput& input, std::vector<double>& reference);
  void RefreshInfo();

  const EngineOptions options_;
  mutable std::mutex mutex_;  // one operation at a time
  std::unique_ptr<Model> model_, reference_;
  std::unique_ptr<parallel::Strategy> strategy_;
  std::unique_ptr<loss::FusedOutputLoss> loss_, reference_loss_;
  std::unique_ptr<BoundarySets> boundaries_;
  std::shared_ptr<CriticConnection> critic_;
  training::TrainingState state_{.kind = "trainer"};
  std::weak_ptr<const WeightSource> snapshot_;  // of the current version, while somebody holds it

  mutable std::mutex info_mutex_;
  EngineInfo info_;
};

absl::StatusOr<std::unique_ptr<Engine>> TorchEngine::Create(
    const EngineOptions& options, std::shared_ptr<CriticConnection> critic) {
  for (const auto& [field, value] : {std::pair{"micro_batch_tokens", options.micro_batch_tokens},
                                     std::pair{"max_model_len", options.max_model_len},
                                     std::pair{"max_samples", options.max_samples}}) {
    if (value < 1) return InvalidField(field, "must be positive");
  }
  if (options.num_threads > 0) at::set_num_threads(options.num_threads);
  std::unique_ptr<TorchEngine> engine(new TorchEngine(options));
  engine->critic_ = std::move(critic);
  const loss::LinearCrossEntropyOptions loss_options = {.logits_chunk_bytes =
                                                            options.logits_chunk_bytes};

  absl::StatusOr<std::unique_ptr<Model>> model =
      Model::Load(options.model, {.head = HeadKind::kLm, .requires_grad = true});
  if (!model.ok()) return PrependFieldPath("model", model.status());
  engine->model_ = *std::move(model);
  TANDEM_ASSIGN_OR_RETURN(engine->strategy_, parallel::CreateStrategy("single"));
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("optimizer", engine->strategy_->Build(*engine->model_, options.optimizer)));
  TANDEM_ASSIGN_OR_RETURN(auto output_loss,
                          loss::LinearCrossEntropyLoss::Create(
                              engine->model_->lm_head().compute_weight(), {}, loss_options));
  if (!output_loss->fallback_warning().empty()) {
    Log(LogLevel::kWarning, "fused_loss_fallback",
        {LogField{"message", output_loss->fallback_warning()}});
  }
  engine->loss_ = std::move(output_loss);

  if (!options.reference_model.empty()) {
    absl::StatusOr<std::unique_ptr<Model>> reference = Model::Load(options.reference_model, {});
    if (!reference.ok()) return PrependFieldPath("reference_model", reference.status());
    engine->reference_ = *std::move(reference);
    if (engine->reference_->config().vocab_size != engine->model_->config().vocab_size) {
      return InvalidField("reference_model", "has another vocabulary than the model");
    }
    TANDEM_ASSIGN_OR_RETURN(engine->reference_loss_,
                            loss::LinearCrossEntropyLoss::Create(
                                engine->reference_->lm_head().compute_weight(), {}, loss_options));
  }

  // Sentences are only counted for a report: a model without a tokenizer trains without it.
  const absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Load(options.model);
  if (!vocabulary.ok() && !absl::IsNotFound(vocabulary.status())) {
    return PrependFieldPath("model", vocabulary.status());
  }
  if (vocabulary.ok()) {
    const std::vector<int64_t>& eos = engine->model_->config().eos_token_ids;
    engine->boundaries_ =
        std::make_unique<BoundarySets>(*vocabulary, std::vector<int32_t>(eos.begin(), eos.end()));
  }
  engine->RefreshInfo();
  return engine;
}

void TorchEngine::RefreshInfo() {
  EngineInfo info;
  info.model = model_->Summary(Limits().sequence.max_model_len);
  info.weights = {.version = state_.version, .digest = WeightsDigest(model_->Parameters())};
  info.optimizer_steps = strategy_->optimizer_steps();
  info.micro_batch_tokens = options_.micro_batch_tokens;
  const std::lock_guard lock(info_mutex_);
  info_ = std::move(info);
}

BatchLimits TorchEngine::Limits() const {
  const ModelConfig& config = model_->config();
  BatchLimits limits;
  limits.sequence.vocab_size = config.vocab_size;
  limits.sequence.max_model_len = config.LongestSequence(options_.max_model_len);
  limits.max_samples = options_.max_samples;
  limits.policy_version = state_.version;
  limits.has_critic = critic_ != nullptr;
  limits.has_reference = reference_ != nullptr;
  return limits;
}

absl::StatusOr<TrainStepResult> TorchEngine::TrainStep(const TrainStepRequest& request) {
  const std::lock_guard lock(mutex_);
  const std::string digest = PayloadDigest(request);
  TANDEM_ASSIGN_OR_RETURN(const std::optional<std::string> stored,
                          training::AdmitStep(state_,
                                              {.run_id = request.run_id,
                                               .step = request.step,
                                               .request_id = request.request_id,
                                               .payload_digest = digest,
                                               .expected_version = request.expected_version},
                                              "expected_version"));
  if (stored.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(StepReport report, DecodeReport(*stored));
    return TrainStepResult{.report = std::move(report), .replayed = true};
  }
  const auto* policy = std::get_if<PolicyBatch>(&request.batch);
  absl::StatusOr<StepReport> report = CatchTorchErrors("train step", [&] {
    return policy != nullptr ? PolicyStep(request, *policy)
                             : SupervisedStep(std::get<SupervisedBatch>(request.batch));
  });
  if (!report.ok()) return report.status();
  report->run_id = request.run_id;
  report->step = request.step;
  if (!report->skipped) RefreshInfo();
  report->weights = Info().weights;
  state_.ledger.Record(request.run_id, request.request_id, digest, EncodeReport(*report));
  return TrainStepResult{.report = *std::move(report), .replayed = false};
}

absl::StatusOr<Advantages> TorchEngine::AdvantagesOf(const TrainStepRequest& request,
                                                     const PolicyBatch& batch, Metrics& metrics) {
  if (batch.objective.advantage_estimator != AdvantageEstimator::kGae) {
    return PolicyAdvantages(batch, nullptr);
  }
  CriticConnection::TrainRequest train;
  for (const PolicySample& sample : batch.samples) {
    train.sequences.push_back(
        {sample.trajectory.prompt_token_ids, sample.trajectory.response_token_ids});
  }
  TANDEM_ASSIGN_OR_RETURN(CriticConnection::Values values, critic_->ComputeValues(train.sequences));
  TANDEM_ASSIGN_OR_RETURN(Advantages advantages, PolicyAdvantages(batch, &values));
  train.run_id = request.run_id;
  train.step = request.step;
  train.request_id = request.request_id;
  train.expected_version = values.weights.version;
  train.old_values = std::move(values.values);
  train.returns = advantages.returns;
  const absl::StatusOr<Metrics> critic_metrics = critic_->TrainStep(train);
  if (critic_metrics.ok()) {
    metrics.insert(critic_metrics->begin(), critic_metrics->end());
  } else if (!HasReason(critic_metrics.status(), reason::kRequestIdReused)) {
    return critic_metrics.status();
  } else {
    // The critic learnt this step in an earlier attempt, which then failed here or was undone by
    // loading an older checkpoint. Its metrics are absent from the report.
    Log(LogLevel::kWarning, "critic_step_already_applied",
        {{"run_id", request.run_id}, {"step", request.step}});
  }
  return advantages;
}

absl::StatusOr<StepReport> TorchEngine::PolicyStep(const TrainStepRequest& request,
                                                   const PolicyBatch& batch) {
  TANDEM_RETURN_IF_ERROR(CheckPolicyBatch(batch, Limits()));
  absl::StatusOr<loss::LossScales> scales = PolicyScales(batch);
  if (!scales.ok()) return PrependFieldPath("policy", scales.status());
  StepReport report;
  AddBatchMetrics(batch, boundaries_ == nullptr ? nullptr : &boundaries_->sentence(),
                  report.metrics);
  if (scales->total_weight == 0) {
    report.skipped = true;
    report.skip_reason = kSkipReason;
    return report;
  }
  TANDEM_ASSIGN_OR_RETURN(const Advantages advantages,
                          AdvantagesOf(request, batch, report.metrics));
  TrainingRows rows = PolicyRows(batch, *scales, advantages.advantages);
  loss::PolicyLossOptions options = batch.objective.loss;
  if (options.kl_coefficient == 0) options.kl_estimator = loss::KlEstimator::kNone;
  const bool with_reference = options.kl_estimator != loss::KlEstimator::kNone;
  if (with_reference) rows.tokens.reference.resize(rows.tokens.scales.size());
  TANDEM_ASSIGN_OR_RETURN(loss::PolicyLossEvaluator evaluator,
                          loss::PolicyLossEvaluator::Create(options, rows.tokens));
  TANDEM_RETURN_IF_ERROR(Update(
      rows, [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
      [&](const MicroBatchInput& input) {
        return with_reference ? AddReferenceLogProbs(input, rows.tokens.reference)
                              : absl::OkStatus();
      },
      report));
  AddPolicyMetrics(evaluator.Metrics(), report.metrics);
  return report;
}

absl::StatusOr<StepReport> TorchEngine::SupervisedStep(const SupervisedBatch& batch) {
  TANDEM_RETURN_IF_ERROR(CheckSupervisedBatch(batch, Limits()));
  absl::StatusOr<loss::LossScales> scales = SupervisedScales(batch);
  if (!scales.ok()) return PrependFieldPath("supervised", scales.status());
  StepReport report;
  AddBatchMetrics(batch, report.metrics);
  const TrainingRows rows = SupervisedRows(batch, *scales);
  loss::SupervisedLossEvaluator evaluator(rows.tokens.scales);
  TANDEM_RETURN_IF_ERROR(Update(
      rows, [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
      [](const MicroBatchInput&) { return absl::OkStatus(); }, report));
  report.metrics["loss/total"] = evaluator.loss();
  report.metrics["policy/entropy"] = evaluator.mean_entropy();
  report.metrics["policy/weighted_tokens"] = static_cast<double>(evaluator.tokens());
  return report;
}

absl::Status TorchEngine::Update(const TrainingRows& rows, loss::TokenLossFunction function,
                                 absl::FunctionRef<absl::Status(const MicroBatchInput&)> before,
                                 StepReport& report) {
  std::vector<int64_t> lengths;
  for (const SequenceRows& sequence : rows.sequences) {
    lengths.push_back(static_cast<int64_t>(sequence.input.size()));
  }
  const std::vector<training::MicroBatch> plan =
      training::PlanMicroBatches(lengths, options_.micro_batch_tokens);
  const std::vector<size_t> first_rows = rows.FirstRows();
  TANDEM_RETURN_IF_ERROR(
      strategy_->ForwardBackward(static_cast<int64_t>(plan.size()), [&](int64_t i) -> absl::Status {
        const MicroBatchInput input = MakeInput(rows, first_rows, plan[static_cast<size_t>(i)]);
        TANDEM_RETURN_IF_ERROR(before(input));
        CausalContext context;
        const at::Tensor hidden = model_->HiddenStates(input.batch, context);
        // Undefined where a freeze leaves nothing to train.
        loss::OutputGradients gradients = {
            .hidden =
                hidden.requires_grad() ? at::zeros_like(hidden.detach(), at::kFloat) : at::Tensor(),
            .weight = strategy_->Gradient(model_->lm_head_name()),
            .bias = {}};
        TANDEM_RETURN_IF_ERROR(loss_->ForwardBackward(
            hidden.detach(), input.rows,
            [&](int64_t first_row, auto... arguments) {
              return function(static_cast<int64_t>(input.first_row) + first_row, arguments...);
            },
            gradients));
        if (hidden.requires_grad()) hidden.backward(gradients.hidden.to(hidden.scalar_type()));
        return absl::OkStatus();
      }));
  TANDEM_ASSIGN_OR_RETURN(const parallel::OptimizerReport optimizer, strategy_->OptimizerStep());
  ++state_.version;
  snapshot_.reset();
  report.metrics["policy/grad_norm"] = optimizer.grad_norm;
  report.metrics["policy/learning_rate"] = optimizer.learning_rate;
  report.metrics["policy/micro_batches"] = static_cast<double>(plan.size());
  return absl::OkStatus();
}

absl::Status TorchEngine::AddReferenceLogProbs(const MicroBatchInput& input,
                                               std::vector<double>& reference) {
  const at::NoGradGuard no_grad;
  CausalContext context;
  const at::Tensor hidden = reference_->HiddenStates(input.batch, context);
  TANDEM_ASSIGN_OR_RETURN(const loss::RowStatistics statistics,
                          reference_loss_->LogProbs(hidden, input.rows));
  std::copy(statistics.logprobs.begin(), statistics.logprobs.end(),
            reference.begin() + static_cast<int64_t>(input.first_row));
  return absl::OkStatus();
}

absl::StatusOr<LogProbsResult> TorchEngine::ComputeLogProbs(const LogProbsRequest& request) {
  const std::lock_guard lock(mutex_);
  TANDEM_RETURN_IF_ERROR(training::CheckSequence(request.prompt_token_ids,
                                                 request.response_token_ids, Limits().sequence));
  if (!(request.temperature > 0 && request.temperature <= 100)) {
    return InvalidField("temperature", "must be in (0, 100]");
  }
  return CatchTorchErrors("log-probabilities", [&]() -> absl::StatusOr<LogProbsResult> {
    const at::NoGradGuard no_grad;
    TrainingRows rows;
    rows.sequences.push_back(
        SelectSequenceRows(request.prompt_token_ids, request.response_token_ids, {}));
    rows.temperatures.assign(request.response_token_ids.size(), request.temperature);
    const MicroBatchInput input = MakeInput(rows, rows.FirstRows(), {0, 1});
    CausalContext context;
    const at::Tensor hidden = model_->HiddenStates(input.batch, context);
    TANDEM_ASSIGN_OR_RETURN(const loss::RowStatistics statistics,
                            loss_->LogProbs(hidden, input.rows));
    LogProbsResult result;
    result.logprobs.assign(statistics.logprobs.begin(), statistics.logprobs.end());
    result.entropies.assign(statistics.entropies.begin(), statistics.entropies.end());
    result.weights = Info().weights;
    return result;
  });
}

absl::StatusOr<std::shared_ptr<const WeightSource>> TorchEngine::Snapshot() {
  const std::lock_guard lock(mutex_);
  if (std::shared_ptr<const WeightSource> held = snapshot_.lock(); held != nullptr) return held;
  return CatchTorchErrors(
      "weight snapshot", [&]() -> absl::StatusOr<std::shared_ptr<const WeightSource>> {
        TANDEM_ASSIGN_OR_RETURN(const NamedTensors parameters, strategy_->GatherParameters());
        TANDEM_ASSIGN_OR_RETURN(std::shared_ptr<const WeightSource> snapshot,
                                training::MakeWeightSnapshot(parameters, state_.version));
        snapshot_ = snapshot;
        return snapshot;
      });
}

absl::StatusOr<checkpoint::Saved> TorchEngine::SaveCheckpoint(const std::string& directory,
                                                              const std::string& name,
                                                              int64_t keep) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("checkpoint", [&] {
    return training::SaveTraining(directory, name, keep, *model_, *strategy_, state_);
  });
}

absl::Status TorchEngine::LoadCheckpoint(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("checkpoint", [&]() -> absl::Status {
    TANDEM_RETURN_IF_ERROR(training::LoadTraining(path, *model_, *strategy_, state_));
    snapshot_.reset();
    RefreshInfo();
    return absl::OkStatus();
  });
}

absl::Status TorchEngine::ExportModel(const std::string& path, DType dtype) {
  const std::lock_guard lock(mutex_);
  return CatchTorchErrors("export", [&] { return training::ExportModel(*model_, path, dtype); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic) {
  return CatchTorchErrors("model", [&] { return TorchEngine::Create(options, std::move(critic)); });
}

}  // namespace tandem::trainer
