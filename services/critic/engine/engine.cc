#include "services/critic/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/loss_scale.h"
#include "common/loss/value_loss.h"
#include "common/model/model.h"
#include "common/steps/mini_batches.h"
#include "common/steps/sequence_check.h"
#include "common/tensor/aten/device_copies.h"
#include "services/critic/engine/value_step.h"
#include "services/training_core/training_core.h"

namespace tandem::critic {
namespace {

// The state that the updates of a step share.
struct ValueRows {
  training::SequenceBatch sequences;                  // in the order of the samples
  loss::ValueTokens tokens;                           // scales are relative to the mini-batch
  std::optional<loss::ValueLossEvaluator> evaluator;  // of the updates so far
  training::RouterSums routers;
  int64_t updates = 0;
};

// The rows of a step whose samples have weights.
struct WeightedRows {
  training::SequenceBatch sequences;
  std::vector<double> weights;  // of each row
};

// Returns the images of a sample, or an error with its path.
absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOfSample(training::TrainingCore& core,
                                                                   const TrainStepRequest& request,
                                                                   size_t i) {
  const ValueSample& sample = request.samples[i];
  auto images = core.ImagesOf(sample.prompt_token_ids, sample.response_token_ids,
                              sample.vision_inputs, request.blobs);
  if (images.ok()) return images;
  return PrependFieldPath(absl::StrCat("samples[", i, "]"), images.status());
}

// Returns the rows of a sample that have a weight, which it adds to `weights`; all of them unless
// the step `learns`.
training::SequenceRows WeightedSequence(const ValueSample& sample, bool learns,
                                        std::shared_ptr<const PromptImages> images,
                                        std::vector<double>& weights) {
  training::SequenceRows rows;
  const size_t first = sample.prompt_token_ids.size() - 1;
  for (size_t t = 0; t < sample.weights.size(); ++t) {
    if (learns && sample.weights[t] == 0) continue;
    rows.positions.push_back(static_cast<int64_t>(first + t));
    rows.labels.push_back(0);  // a value predicts no token
    weights.push_back(sample.weights[t]);
  }
  if (rows.positions.empty()) return rows;
  std::vector<int32_t> tokens = sample.prompt_token_ids;
  tokens.insert(tokens.end(), sample.response_token_ids.begin(), sample.response_token_ids.end());
  rows.input.assign(tokens.begin(), tokens.begin() + rows.positions.back() + 1);
  rows.images = std::move(images);
  return rows;
}

std::string DigestOf(const ValuesRequest& request) {
  return training::KeptValues::SequenceDigest(request.prompt_token_ids, request.response_token_ids,
                                              request.vision_inputs);
}

class TorchEngine final : public training::CoreEngine<Engine> {
 public:
  TorchEngine(const EngineOptions& options, std::unique_ptr<training::TrainingCore> core)
      : CoreEngine(std::move(core)),
        options_(options),
        value_head_from_checkpoint_(core_->model().value_head_source() ==
                                    ValueHeadSource::kCheckpoint),
        compute_values_(core_->AddCommand<ValuesBatch, absl::StatusOr<ValuesResults>>(
            "values", [this](const CallScope&, const auto& batch) { return Values(batch); },
            training::TrainingCore::Needs::kWeights)),
        train_step_(core_->AddCommand<TrainStepRequest, absl::StatusOr<StepResult>>(
            "train step",
            [this](const CallScope&, const auto& request) {
              return core_->Step(request, [&](StepReport&) { return Learn(request); });
            },
            training::TrainingCore::Needs::kWeights)) {
    core_->Start();
  }
  // Commands use the members.
  ~TorchEngine() override { core_->Shutdown(); }

  bool value_head_from_checkpoint() const override { return value_head_from_checkpoint_; }
  absl::StatusOr<ValuesResults> ComputeValues(const CallScope& call,
                                              const ValuesBatch& batch) override {
    return compute_values_(call, batch);
  }
  absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                       const TrainStepRequest& request) override {
    return train_step_(call, request);
  }

 private:
  absl::StatusOr<ValuesResults> Values(const ValuesBatch& batch);
  // The sequences of a batch whose values are not kept.
  struct Unknown {
    training::SequenceBatch sequences;
    std::vector<size_t> requests;  // of the batch
    // By the names of their steps: how many there are.
    std::map<std::pair<std::string, std::string>, int64_t> of_step;
  };
  // Returns the values that are kept for a request, if it is of a step, or adds it to `unknown`.
  absl::StatusOr<std::optional<ValuesResult>> FindKept(const ValuesBatch& batch, size_t index,
                                                       Unknown& unknown);
  // Computes the values of sequences, in order.
  absl::StatusOr<std::vector<training::SequenceValues>> Evaluate(const ValuesBatch& batch,
                                                                 const Unknown& unknown);
  // Checks the batch and returns the updates of a step.
  absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> Learn(
      const TrainStepRequest& request);
  // The same for a checked step with weights.
  absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> LearnWeighted(
      const TrainStepRequest& request);
  absl::Status AddGradients(ValueRows& rows, const training::MiniBatch& range, StepReport& report);
  absl::Status AddWeightedGradients(const WeightedRows& rows, StepReport& report);
  // Evaluates the loss of rows: fills d loss / d value of the rows [first_row, first_row + n).
  using LossOfRows = absl::FunctionRef<absl::Status(
      int64_t first_row, absl::Span<const double> values, absl::Span<double> gradients)>;
  // Leaves the gradients of a mini-batch with the strategy.
  absl::StatusOr<training::TrainingCore::PassReport> PassOver(
      const training::SequenceBatch& sequences, const training::MiniBatch& range,
      LossOfRows evaluate);

  const EngineOptions options_;
  const bool value_head_from_checkpoint_;
  const training::TrainingCore::Command<ValuesBatch, absl::StatusOr<ValuesResults>> compute_values_;
  const training::TrainingCore::Command<TrainStepRequest, absl::StatusOr<StepResult>> train_step_;
};

absl::StatusOr<Engine::ValuesResults> TorchEngine::Values(const ValuesBatch& batch) {
  ValuesResults answers;
  Unknown unknown;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    absl::StatusOr<std::optional<ValuesResult>> kept = FindKept(batch, i, unknown);
    if (!kept.ok()) {
      answers.error = kept.status();
      break;
    }
    answers.results.push_back(kept->value_or(ValuesResult()));
    // Who asks for a step's values asks for the version alone.
    if (batch.requests[i].request_id.empty()) TANDEM_RETURN_IF_ERROR(core_->PrepareDigest());
  }
  TANDEM_ASSIGN_OR_RETURN(std::vector<training::SequenceValues> computed, Evaluate(batch, unknown));
  for (size_t i = 0; i < computed.size(); ++i) {
    const ValuesRequest& request = batch.requests[unknown.requests[i]];
    answers.results[unknown.requests[i]] = {.values = computed[i].values,
                                            .final_value = computed[i].final_value,
                                            .weights = core_->weights()};
    if (request.request_id.empty()) continue;
    core_->state()
        .kept_values.Open(request.run_id, request.request_id, core_->weights())
        .by_sequence[DigestOf(request)] = std::move(computed[i]);
  }
  return answers;
}

absl::StatusOr<std::optional<ValuesResult>> TorchEngine::FindKept(const ValuesBatch& batch,
                                                                  size_t index, Unknown& unknown) {
  const ValuesRequest& request = batch.requests[index];
  TANDEM_RETURN_IF_ERROR(training::CheckSequence(request.prompt_token_ids,
                                                 request.response_token_ids, core_->limits()));
  if (!request.request_id.empty()) {
    const training::TrainingState& state = core_->state();
    const training::KeptValues::Step* kept =
        state.kept_values.Find(request.run_id, request.request_id);
    // Values of other weights are valid only if the step was learnt from them.
    if (kept != nullptr && kept->weights.version != state.version &&
        !state.ledger.Contains(request.run_id, request.request_id)) {
      kept = nullptr;
    }
    int64_t held = 0;
    if (kept != nullptr) {
      const auto found = kept->by_sequence.find(DigestOf(request));
      if (found != kept->by_sequence.end()) {
        return std::optional(ValuesResult{.values = found->second.values,
                                          .final_value = found->second.final_value,
                                          .weights = kept->weights});
      }
      held = static_cast<int64_t>(kept->by_sequence.size());
    }
    int64_t& added = unknown.of_step[{request.run_id, request.request_id}];
    if (held + added >= options_.max_samples) {
      return FieldError(absl::StatusCode::kOutOfRange, "step",
                        absl::StrCat("a step holds at most ", options_.max_samples, " samples"));
    }
    ++added;
  }
  training::SequenceRows whole;  // the final value is computed from the last token
  whole.input.assign(request.prompt_token_ids.begin(), request.prompt_token_ids.end());
  whole.input.insert(whole.input.end(), request.response_token_ids.begin(),
                     request.response_token_ids.end());
  whole.unasked = std::ssize(request.prompt_token_ids) - 1;
  TANDEM_ASSIGN_OR_RETURN(whole.images,
                          core_->ImagesOf(request.prompt_token_ids, request.response_token_ids,
                                          request.vision_inputs, request.blobs));
  unknown.sequences.Add(std::move(whole));
  unknown.requests.push_back(index);
  return std::optional<ValuesResult>();
}

absl::StatusOr<std::vector<training::SequenceValues>> TorchEngine::Evaluate(
    const ValuesBatch& batch, const Unknown& unknown) {
  const auto prompt_of = [&](size_t sequence) {
    return static_cast<int64_t>(batch.requests[unknown.requests[sequence]].prompt_token_ids.size());
  };
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> numbers,
      core_->Forward(
          unknown.sequences,
          [&](const training::MicroBatchInput& input,
              const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
            std::vector<int64_t> rows;  // before each response token, and after the last one
            size_t next = 0;
            for (size_t s = input.sequences.begin; s < input.sequences.end; ++s, ++next) {
              const int64_t end = input.batch.offsets[next + 1];
              for (int64_t row = input.batch.RowOf(next, prompt_of(s) - 1); row < end; ++row) {
                rows.push_back(row);
              }
            }
            const at::Tensor values =
                core_->model()
                    .Values(hidden.index_select(0, CopyToDevice(rows, hidden.device())))
                    .to(at::kCPU, at::kDouble)
                    .contiguous();
            const double* const data = values.const_data_ptr<double>();
            return std::vector<double>(data, data + values.numel());
          }));
  std::vector<training::SequenceValues> results;
  auto number = numbers.begin();
  for (const size_t request : unknown.requests) {
    const auto end =
        number + static_cast<int64_t>(batch.requests[request].response_token_ids.size());
    results.push_back({.values = {number, end}, .final_value = static_cast<float>(*end)});
    number = end + 1;
  }
  return results;
}

absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> TorchEngine::Learn(
    const TrainStepRequest& request) {
  TANDEM_RETURN_IF_ERROR(CheckTrainStep(request, core_->limits(), options_.max_samples));
  if (HasWeights(request)) return LearnWeighted(request);
  const std::vector<training::MiniBatch> ranges =
      training::SplitIntoMiniBatches(request.samples.size(), request.updates);
  auto rows = std::make_shared<ValueRows>();
  for (size_t i = 0; i < request.samples.size(); ++i) {
    const ValueSample& sample = request.samples[i];
    training::SequenceRows sequence =
        training::SelectSequenceRows(sample.prompt_token_ids, sample.response_token_ids,
                                     [&](size_t t) { return Counts(sample, t); });
    TANDEM_ASSIGN_OR_RETURN(sequence.images, ImagesOfSample(*core_, request, i));
    rows->sequences.Add(std::move(sequence));
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t) {
      if (!Counts(sample, t)) continue;
      rows->tokens.returns.push_back(sample.returns[t]);
      rows->tokens.old_values.push_back(sample.old_values[t]);
    }
  }
  for (const training::MiniBatch& range : ranges) {
    const size_t count = rows->sequences.Rows(range).size();
    TANDEM_ASSIGN_OR_RETURN(const loss::LossScales scales,
                            loss::ComputeLossScales({}, std::vector<double>(count, 1.0),
                                                    {static_cast<int64_t>(count)}));
    rows->tokens.scales.insert(rows->tokens.scales.end(), scales.scales.begin(),
                               scales.scales.end());
  }
  TANDEM_ASSIGN_OR_RETURN(
      const loss::ValueLossEvaluator evaluator,
      loss::ValueLossEvaluator::Create({.clip = request.value_clip}, rows->tokens));
  rows->evaluator = evaluator;

  std::vector<training::TrainingCore::UpdateGradients> updates;
  for (int64_t epoch = 0; epoch < request.updates.num_epochs; ++epoch) {
    for (const training::MiniBatch& range : ranges) {
      if (rows->sequences.Rows(range).size() == 0) continue;
      updates.emplace_back(
          [this, rows, range](StepReport& report) { return AddGradients(*rows, range, report); });
    }
  }
  return updates;
}

absl::StatusOr<training::TrainingCore::PassReport> TorchEngine::PassOver(
    const training::SequenceBatch& sequences, const training::MiniBatch& range,
    LossOfRows evaluate) {
  return core_->ForwardBackward(
      sequences, range,
      [&](const training::MicroBatchInput& input,
          const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
        const at::Tensor values = core_->model().Values(
            hidden.index_select(0, CopyToDevice(input.positions, hidden.device())));
        const at::Tensor host = values.detach().to(at::kCPU, at::kDouble).contiguous();
        std::vector<double> gradients(static_cast<size_t>(host.numel()));
        TANDEM_RETURN_IF_ERROR(
            evaluate(static_cast<int64_t>(input.rows.begin),
                     absl::MakeConstSpan(host.const_data_ptr<double>(), gradients.size()),
                     absl::MakeSpan(gradients)));
        values.backward(at::tensor(gradients, at::kDouble).to(values.options()));
        return hidden.grad();
      });
}

absl::Status TorchEngine::AddGradients(ValueRows& rows, const training::MiniBatch& range,
                                       StepReport& report) {
  loss::ValueLossEvaluator evaluator = *rows.evaluator;  // an update that fails reports nothing
  TANDEM_ASSIGN_OR_RETURN(const training::TrainingCore::PassReport pass,
                          PassOver(rows.sequences, range, [&](auto... arguments) {
                            return evaluator.Evaluate(arguments...);
                          }));
  // The report has the sums of all ranks; each rank goes on with its own.
  loss::ValueLossEvaluator all = evaluator;
  TANDEM_RETURN_IF_ERROR(all.Reduce(core_->reduction()));
  const loss::ValueMetrics metrics = all.Metrics();
  rows.evaluator = evaluator;
  rows.routers.Add(pass.routers);
  ++rows.updates;
  report.metrics = {{"critic/loss", metrics.loss / static_cast<double>(rows.updates)},
                    {"critic/clip_fraction", metrics.clip_fraction},
                    {"critic/explained_variance", metrics.explained_variance},
                    {"critic/value_mean", metrics.value_mean},
                    {"critic/return_mean", metrics.return_mean}};
  training::AddRouterMetrics(rows.routers, /*prefix=*/"critic/router_", report.metrics);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> TorchEngine::LearnWeighted(
    const TrainStepRequest& request) {
  const auto rows = std::make_shared<WeightedRows>();
  // A step without any weight is still an update, with gradients of 0.
  const bool learns = std::ranges::any_of(request.samples, [](const ValueSample& sample) {
    return std::ranges::any_of(sample.weights, [](float weight) { return weight != 0; });
  });
  for (size_t i = 0; i < request.samples.size(); ++i) {
    const ValueSample& sample = request.samples[i];
    TANDEM_ASSIGN_OR_RETURN(auto images, ImagesOfSample(*core_, request, i));
    rows->sequences.Add(WeightedSequence(sample, learns, std::move(images), rows->weights));
  }
  return std::vector<training::TrainingCore::UpdateGradients>{
      [this, rows](StepReport& report) { return AddWeightedGradients(*rows, report); }};
}

absl::Status TorchEngine::AddWeightedGradients(const WeightedRows& rows, StepReport& report) {
  loss::WeightedValueLoss sums(rows.weights);
  TANDEM_ASSIGN_OR_RETURN(const training::TrainingCore::PassReport pass,
                          PassOver(rows.sequences, rows.sequences.all(),
                                   [&](auto... arguments) { return sums.Evaluate(arguments...); }));
  TANDEM_RETURN_IF_ERROR(sums.Reduce(core_->reduction()));
  report.metrics = {{"critic/loss", sums.loss()}, {"critic/value_mean", sums.mean_value()}};
  training::AddRouterMetrics(pass.routers, /*prefix=*/"critic/router_", report.metrics);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(
      std::unique_ptr<training::TrainingCore> core,
      training::TrainingCore::Create("critic", "critic/", options,
                                     {.head = HeadKind::kValue,
                                      .untie_embeddings = options.untie_embeddings,
                                      .value_head_seed = options.value_head_seed,
                                      .requires_grad = true}));
  return std::make_unique<TorchEngine>(options, std::move(core));
}

}  // namespace tandem::critic
