#include "common/speculator/adapters/speculator_loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/logits/output_rows.h"
#include "common/loss/supervised_loss.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::speculator {

SpeculatorLoss::SpeculatorLoss(const Speculator& speculator, SpeculatorLossOptions options)
    : speculator_(speculator), options_(std::move(options)) {}

absl::StatusOr<SpeculatorLossReport> SpeculatorLoss::ForwardBackward(
    const SpeculatorBatch& batch) const {
  if (!speculator_.requires_grad()) {
    return absl::FailedPreconditionError("the speculator was made without gradients");
  }
  return Run(batch, /*backward=*/true);
}

absl::StatusOr<SpeculatorLossReport> SpeculatorLoss::Evaluate(const SpeculatorBatch& batch) const {
  const at::NoGradGuard no_grad;
  return Run(batch, /*backward=*/false);
}

absl::Status SpeculatorLoss::Check(const SpeculatorBatch& batch) const {
  TANDEM_RETURN_IF_ERROR(CheckAbove("coefficient", options_.coefficient, 0));
  const auto& counts = options_.target_counts;
  if (!counts.empty() && static_cast<int64_t>(counts.size()) != speculator_.sizes().n_predict) {
    return InvalidField("target_counts", "must be empty or have one entry per head");
  }
  const auto num_tokens = static_cast<int64_t>(batch.labels.size());
  const int64_t hidden_size = speculator_.sizes().hidden_size;
  if (batch.hidden.dim() != 2 || batch.hidden.size(0) != num_tokens ||
      batch.hidden.size(1) != hidden_size) {
    return InvalidField("hidden",
                        absl::StrCat("must be [", num_tokens, ", ", hidden_size,
                                     "]: one row per label, of the language model's hidden size"));
  }
  if (batch.tokens.dim() != 1 || batch.tokens.size(0) != num_tokens ||
      batch.tokens.scalar_type() != at::kLong) {
    return InvalidField("tokens", "must be one int64 id per label");
  }
  return absl::OkStatus();
}

absl::StatusOr<SpeculatorLossReport> SpeculatorLoss::Run(const SpeculatorBatch& batch,
                                                         bool backward) const {
  TANDEM_RETURN_IF_ERROR(Check(batch));
  const int64_t n_predict = speculator_.sizes().n_predict;
  TANDEM_ASSIGN_OR_RETURN(
      const SpeculatorRows rows,
      AlignRows(batch.sequences, batch.labels, n_predict, speculator_.num_token_ids()));
  SpeculatorLossReport report;
  if (rows.size() == 0) {
    report.heads.resize(static_cast<size_t>(n_predict));
    return report;
  }

  const at::Tensor positions = CopyToDevice(rows.positions, batch.hidden.device());
  std::vector<at::Tensor> tokens;
  for (int64_t step = 0; step < n_predict; ++step) {
    tokens.push_back(batch.tokens.index_select(0, positions + (step + 1)));
  }
  const std::vector<at::Tensor> states = speculator_.States(
      {.hidden = batch.hidden.index_select(0, positions), .offsets = rows.offsets}, tokens);

  // The gradient of each state from its own head; autograd adds what comes through later steps.
  at::Tensor total;
  for (size_t head = 0; head < states.size(); ++head) {
    at::Tensor gradient;
    TANDEM_ASSIGN_OR_RETURN(const HeadReport head_report,
                            RunHead(static_cast<int64_t>(head), states[head], rows.targets[head],
                                    backward ? &gradient : nullptr));
    report.loss += head_report.loss;
    report.heads.push_back(head_report);
    if (!backward) continue;
    const at::Tensor product = (states[head] * gradient).sum();
    total = total.defined() ? total + product : product;
  }
  if (backward) total.backward();
  return report;
}

absl::StatusOr<HeadReport> SpeculatorLoss::RunHead(int64_t head, const at::Tensor& state,
                                                   const loss::OutputRows& targets,
                                                   at::Tensor* state_gradient) const {
  const at::Tensor hidden = state.detach();
  const at::Tensor weight = speculator_.output_weight(head).detach();
  HeadReport report = {.targets = static_cast<int64_t>(targets.labels.size())};
  loss::OutputGradients gradients;
  if (state_gradient != nullptr) {
    gradients.hidden = at::zeros_like(hidden);
    *state_gradient = gradients.hidden;
  }
  if (report.targets == 0) return report;

  TANDEM_ASSIGN_OR_RETURN(const double scale, Scale(head, report.targets));
  const std::vector<double> scales(targets.labels.size(), options_.coefficient * scale);
  loss::SupervisedLossEvaluator evaluator(scales);
  TANDEM_ASSIGN_OR_RETURN(const auto output,
                          loss::LinearCrossEntropyLoss::Create(weight, options_.output_loss));
  if (state_gradient == nullptr) {
    TANDEM_ASSIGN_OR_RETURN(const loss::RowLogProbs rows, output->LogProbs(hidden, targets));
    report.correct = rows.num_greatest;
    std::vector<double> unused(scales.size());
    TANDEM_RETURN_IF_ERROR(evaluator.Evaluate(0, rows.logprobs, rows.entropies,
                                              absl::MakeSpan(unused), absl::MakeSpan(unused)));
  } else {
    at::Tensor& gradient = speculator_.head(head).mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(speculator_.head(head));
    gradients.weight = gradient.narrow(0, 0, weight.size(0));
    TANDEM_RETURN_IF_ERROR(output->ForwardBackward(
        hidden, targets, [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
        gradients, loss::LossMode::kAuto, &report.correct));
  }
  report.loss = evaluator.loss() / options_.coefficient;
  return report;
}

absl::StatusOr<double> SpeculatorLoss::Scale(int64_t head, int64_t targets) const {
  if (options_.target_counts.empty()) return 1 / static_cast<double>(targets);
  const int64_t count = options_.target_counts[static_cast<size_t>(head)];
  TANDEM_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("target_counts[", head, "]"), count, targets));
  return 1 / static_cast<double>(count);
}

}  // namespace tandem::speculator
