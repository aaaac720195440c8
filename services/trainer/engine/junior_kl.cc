#include "services/trainer/engine/junior_kl.h"

#include <ATen/core/grad_mode.h>

#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/loss/supervised_loss.h"

namespace tandem::trainer {

absl::StatusOr<std::unique_ptr<JuniorKl>> JuniorKl::Create(const parallel::OutputShard& senior,
                                                           std::unique_ptr<Model> junior,
                                                           loss::FusedOutputLoss* senior_loss,
                                                           int64_t logits_chunk_bytes) {
  std::unique_ptr<JuniorKl> kl(new JuniorKl(std::move(junior), senior_loss));
  if (kl->junior_ == nullptr) return kl;
  if (senior.group != nullptr) {
    return FieldError(absl::StatusCode::kUnimplemented, "junior_model",
                      absl::StrCat("the divergence from it needs the whole vocabulary, which ",
                                   senior.group->size(), " ranks share out"));
  }
  if (senior_loss == nullptr) return kl;
  TANDEM_ASSIGN_OR_RETURN(
      kl->divergence_,
      loss::LinearDivergenceLoss::Create(senior.weight, kl->junior_->lm_head().compute_weight(),
                                         {.logits_chunk_bytes = logits_chunk_bytes}));
  return kl;
}

absl::Status JuniorKl::AddGradients(const training::MicroBatchInput& input,
                                    const at::Tensor& hidden, const JuniorRows& rows,
                                    size_t first_row, JuniorKlKind kind,
                                    loss::OutputGradients& gradients, JuniorKlSums& sums) {
  const size_t count = input.positions.size();
  if (count == 0) return absl::OkStatus();
  sums.rows += static_cast<int64_t>(count);
  if (kind == JuniorKlKind::kForwardSampled) {
    return AddSampled(input, hidden, rows, first_row, gradients, sums);
  }
  const at::NoGradGuard no_grad;
  CausalContext context;
  const at::Tensor junior_hidden = junior_->HiddenStates(input.batch, context);
  const auto own = absl::MakeConstSpan(rows.temperatures).subspan(first_row, count);
  // All rows of a mini-batch have the same scale.
  const double scale = rows.scales[first_row];
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> kl,
      divergence_->ForwardBackward(
          hidden, junior_hidden,
          {.positions = input.positions, .temperatures = {own.begin(), own.end()}},
          kind == JuniorKlKind::kReverse ? loss::KlDirection::kReverse
                                         : loss::KlDirection::kForward,
          scale, gradients));
  const double sum = std::accumulate(kl.begin(), kl.end(), 0.0);
  sums.kl += sum;
  sums.loss += scale * sum;
  return absl::OkStatus();
}

// The gradient is that of the cross-entropy of what the junior wrote.
absl::Status JuniorKl::AddSampled(const training::MicroBatchInput& input, const at::Tensor& hidden,
                                  const JuniorRows& rows, size_t first_row,
                                  loss::OutputGradients& gradients, JuniorKlSums& sums) {
  const size_t count = input.positions.size();
  const auto scales = absl::MakeConstSpan(rows.scales).subspan(first_row, count);
  const auto temperatures = absl::MakeConstSpan(rows.temperatures).subspan(first_row, count);
  loss::SupervisedLossEvaluator evaluator(scales);
  TANDEM_RETURN_IF_ERROR(senior_loss_->ForwardBackward(
      hidden,
      {.positions = input.positions,
       .labels = input.labels,
       .temperatures = {temperatures.begin(), temperatures.end()}},
      [&](auto... arguments) { return evaluator.Evaluate(arguments...); }, gradients));
  double loss = evaluator.loss();
  for (size_t i = 0; i < count; ++i) loss += scales[i] * rows.logprobs[first_row + i];
  sums.loss += loss;
  sums.kl += loss / scales[0];
  return absl::OkStatus();
}

}  // namespace tandem::trainer
