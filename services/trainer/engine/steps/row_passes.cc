#include "services/trainer/engine/steps/row_passes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/tandem_config.h"
#include "common/ops/linear/low_rank_adapter.h"
#include "common/steps/sequence_check.h"
#include "services/trainer/engine/auxiliary/sample_images.h"

namespace tandem::trainer {
namespace {

// Returns the rows of a micro-batch as the fused loss takes them; `temperatures` has one number for
// each row of the batch.
loss::OutputRows MakeOutputRows(const training::MicroBatchInput& input,
                                const std::vector<double>& temperatures) {
  loss::OutputRows rows = {.positions = input.positions, .labels = input.labels};
  const absl::Span<const double> own = input.rows.Of(temperatures);
  if (std::any_of(own.begin(), own.end(), [](double t) { return t != 1.0; })) {
    rows.temperatures.assign(own.begin(), own.end());
  }
  return rows;
}

// Returns a TrainingCore::RowOutput: the log-probabilities of a micro-batch's rows.
// `loss` is null where no rows are computed.
auto LogProbsOf(loss::LinearCrossEntropyLoss* loss, const TrainingRows& rows) {
  return [loss, &rows](const training::MicroBatchInput& input,
                       const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
    TANDEM_ASSIGN_OR_RETURN(loss::RowLogProbs values,
                            loss->LogProbs(hidden, MakeOutputRows(input, rows.temperatures)));
    return std::move(values.logprobs);
  };
}

// Returns a TrainingCore::RowOutput: log-probability and entropy of each row in turn, so that every
// rank gets both.
auto NumbersOf(loss::LinearCrossEntropyLoss* loss, const std::vector<double>& temperatures) {
  return [loss, &temperatures](const training::MicroBatchInput& input,
                               const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
    TANDEM_ASSIGN_OR_RETURN(const loss::RowLogProbs values,
                            loss->LogProbs(hidden, MakeOutputRows(input, temperatures)));
    std::vector<double> pairs;
    for (size_t row = 0; row < values.logprobs.size(); ++row) {
      pairs.push_back(values.logprobs[row]);
      pairs.push_back(values.entropies[row]);
    }
    return pairs;
  };
}

// Runs a pass of the reference policy, which must exist. `output_of` returns the RowOutput of an
// output loss.
template <typename OutputOf>
absl::StatusOr<std::vector<double>> ForwardReference(TrainerModels& models,
                                                     const training::SequenceBatch& sequences,
                                                     const OutputOf& output_of) {
  if (models.reference == nullptr) {
    const ops::WithoutAdapters without;
    return models.core.Forward(sequences, output_of(models.loss.get()));
  }
  return models.core.ForwardFrozen(*models.reference, sequences,
                                   output_of(models.reference_loss.get()));
}

// The requests of a batch that one model evaluates.
struct RequestedRows {
  training::SequenceBatch sequences;
  std::vector<double> temperatures;  // of each row

  void Add(const LogProbsRequest& request, training::SequenceRows sequence) {
    temperatures.insert(temperatures.end(), request.response_token_ids.size(), request.temperature);
    sequences.Add(std::move(sequence));
  }
};

// Checks a request and returns its rows.
absl::StatusOr<training::SequenceRows> SequenceOf(TrainerModels& models,
                                                  const LogProbsRequest& request) {
  training::TrainingCore& core = models.core;
  if (request.reference && !models.has_reference()) {
    return WithReason(
        FieldError(absl::StatusCode::kFailedPrecondition, "reference",
                   "the trainer has no reference policy: neither reference_model nor lora"),
        reason::kNoReferenceModel);
  }
  TANDEM_RETURN_IF_ERROR(
      training::CheckSequence(request.prompt_token_ids, request.response_token_ids, core.limits()));
  TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", request.temperature, 0));
  TANDEM_RETURN_IF_ERROR(
      Validate(SamplingParams{.temperature = request.temperature}, core.limits().num_token_ids));
  training::SequenceRows sequence = training::SelectSequenceRows(
      request.prompt_token_ids, request.response_token_ids, [](size_t) { return true; });
  TANDEM_ASSIGN_OR_RETURN(sequence.images,
                          core.ImagesOf(request.prompt_token_ids, request.response_token_ids,
                                        request.vision_inputs, request.blobs));
  if (request.reference && models.reference != nullptr && sequence.images != nullptr) {
    TANDEM_RETURN_IF_ERROR(
        CheckTakesImages("reference_model", *models.reference, core, {sequence.images}));
  }
  return sequence;
}

}  // namespace

absl::StatusOr<std::vector<double>> SeniorLogProbs(TrainerModels& models,
                                                   const TrainingRows& rows) {
  return models.core.Forward(rows.sequences, LogProbsOf(models.loss.get(), rows));
}

absl::StatusOr<std::vector<double>> ReferenceLogProbs(TrainerModels& models,
                                                      const TrainingRows& rows) {
  return ForwardReference(models, rows.sequences, [&](loss::LinearCrossEntropyLoss* loss) {
    return LogProbsOf(loss, rows);
  });
}

absl::StatusOr<training::BatchResults<LogProbsResult>> ComputeLogProbs(TrainerModels& models,
                                                                       const LogProbsBatch& batch) {
  training::BatchResults<LogProbsResult> answers;
  RequestedRows senior, reference;
  for (const LogProbsRequest& request : batch.requests) {
    absl::StatusOr<training::SequenceRows> sequence = SequenceOf(models, request);
    if (!sequence.ok()) {
      answers.error = sequence.status();
      break;
    }
    (request.reference ? reference : senior).Add(request, *std::move(sequence));
  }
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> of_senior,
      models.core.Forward(senior.sequences, NumbersOf(models.loss.get(), senior.temperatures)));
  std::vector<double> of_reference;
  if (!reference.sequences.sequences().empty()) {
    TANDEM_ASSIGN_OR_RETURN(
        of_reference,
        ForwardReference(models, reference.sequences, [&](loss::LinearCrossEntropyLoss* loss) {
          return NumbersOf(loss, reference.temperatures);
        }));
  }
  size_t senior_number = 0, reference_number = 0;
  const size_t answered =
      senior.sequences.sequences().size() + reference.sequences.sequences().size();
  for (size_t i = 0; i < answered; ++i) {
    const LogProbsRequest& request = batch.requests[i];
    const std::vector<double>& numbers = request.reference ? of_reference : of_senior;
    size_t& number = request.reference ? reference_number : senior_number;
    LogProbsResult& result = answers.results.emplace_back();
    for (size_t t = 0; t < request.response_token_ids.size(); ++t) {
      result.logprobs.push_back(static_cast<float>(numbers[number++]));
      result.entropies.push_back(static_cast<float>(numbers[number++]));
    }
    if (!request.reference) result.weights = models.core.weights();
  }
  return answers;
}

absl::StatusOr<training::RouterSums> AddGradients(TrainerModels& models, const TrainingRows& rows,
                                                  const training::MiniBatch& range,
                                                  const UpdateLoss& update_loss,
                                                  StepReport& report) {
  training::TrainingCore& core = models.core;
  const auto loss_of_rows = [&](const training::MicroBatchInput& input,
                                const at::Tensor& hidden) -> absl::StatusOr<at::Tensor> {
    // Undefined where a freeze leaves nothing to train.
    loss::OutputGradients gradients = {.hidden = hidden.requires_grad()
                                                     ? at::zeros_like(hidden.detach(), at::kFloat)
                                                     : at::Tensor(),
                                       .weight = core.strategy().OutputGradient()};
    const auto first_row = static_cast<int64_t>(input.rows.begin);
    TANDEM_RETURN_IF_ERROR(models.loss->ForwardBackward(
        hidden.detach(), MakeOutputRows(input, rows.temperatures),
        [&](int64_t row, auto... arguments) {
          return update_loss.evaluate(first_row + row, arguments...);
        },
        gradients, update_loss.mode));
    if (update_loss.add != nullptr) {
      TANDEM_RETURN_IF_ERROR(update_loss.add(input, hidden.detach(), gradients));
    }
    if (models.speculator != nullptr) {
      TANDEM_RETURN_IF_ERROR(models.speculator->AddGradients(rows, input, hidden));
    }
    return hidden.requires_grad() ? gradients.hidden.to(hidden.scalar_type()) : at::Tensor();
  };
  if (models.speculator != nullptr) models.speculator->BeginUpdate(rows, range);
  TANDEM_ASSIGN_OR_RETURN(training::TrainingCore::PassReport pass,
                          core.ForwardBackward(rows.sequences, range, loss_of_rows));
  if (models.speculator != nullptr) {
    TANDEM_RETURN_IF_ERROR(models.speculator->FinishUpdate(report.metrics));
  }
  report.metrics["policy/micro_batches"] = static_cast<double>(pass.micro_batches);
  if (pass.shared_fraction.has_value()) {
    report.metrics["policy/shared_token_fraction"] = *pass.shared_fraction;
  }
  return std::move(pass.routers);
}

absl::Status AddSpeculatorGradients(TrainerModels& models, const TrainingRows& rows,
                                    StepReport& report) {
  models.speculator->BeginUpdate(rows, rows.sequences.all());
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> micro_batches,
      models.core.Forward(rows.sequences,
                          [&](const training::MicroBatchInput& input,
                              const at::Tensor& hidden) -> absl::StatusOr<std::vector<double>> {
                            TANDEM_RETURN_IF_ERROR(
                                models.speculator->AddGradients(rows, input, hidden));
                            return std::vector<double>{1};
                          }));
  TANDEM_RETURN_IF_ERROR(models.speculator->FinishUpdate(report.metrics));
  report.metrics["policy/micro_batches"] = static_cast<double>(micro_batches.size());
  return absl::OkStatus();
}

}  // namespace tandem::trainer
