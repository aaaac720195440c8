#include "services/trainer/engine/auxiliary/teacher_kl.h"

#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/loss/supervised_loss.h"

namespace tandem::trainer {

absl::StatusOr<std::unique_ptr<TeacherKl>> TeacherKl::Create(
    const parallel::OutputShard& senior, const Model* teacher,
    loss::LinearCrossEntropyLoss* senior_loss, int64_t logits_chunk_bytes) {
  std::unique_ptr<TeacherKl> kl(new TeacherKl(senior_loss));
  if (teacher == nullptr || senior_loss == nullptr) return kl;
  TANDEM_ASSIGN_OR_RETURN(kl->divergence_,
                          TeacherDivergence::Create(senior, *teacher, logits_chunk_bytes));
  return kl;
}

absl::Status TeacherKl::AddGradients(const Teacher& teacher, const training::MicroBatchInput& input,
                                     const at::Tensor& hidden, const TaughtRows& rows,
                                     loss::OutputGradients& gradients, TeacherKlSums& sums) {
  const size_t count = input.rows.size();
  if (count == 0) return absl::OkStatus();
  sums.rows += static_cast<int64_t>(count);
  if (teacher.direction == TeacherDirection::kForwardSampled) {
    return AddSampled(input, hidden, rows, gradients, sums);
  }
  const absl::Span<const double> scales = input.rows.Of(rows.scales);
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<double> kl,
      divergence_->AddGradients(input, hidden,
                                {.kind = teacher.direction == TeacherDirection::kReverse
                                             ? loss::DivergenceKind::kReverse
                                             : loss::DivergenceKind::kForward},
                                input.rows.Of(rows.temperatures), scales, gradients));
  const double sum = std::accumulate(kl.begin(), kl.end(), 0.0);
  sums.kl += sum;
  sums.loss += scales.front() * sum;  // all rows of a mini-batch have the same scale
  return absl::OkStatus();
}

// The gradient is that of the cross-entropy of the rows' tokens.
absl::Status TeacherKl::AddSampled(const training::MicroBatchInput& input, const at::Tensor& hidden,
                                   const TaughtRows& rows, loss::OutputGradients& gradients,
                                   TeacherKlSums& sums) {
  const absl::Span<const double> scales = input.rows.Of(rows.scales);
  const absl::Span<const double> temperatures = input.rows.Of(rows.temperatures);
  const absl::Span<const double> logprobs = input.rows.Of(rows.logprobs);
  loss::SupervisedLossEvaluator evaluator(scales);
  TANDEM_RETURN_IF_ERROR(senior_loss_->ForwardBackward(
      hidden,
      {.positions = input.positions,
       .labels = input.labels,
       .temperatures = {temperatures.begin(), temperatures.end()}},
      [&](auto... arguments) { return evaluator.Evaluate(arguments...); }, gradients));
  double loss = evaluator.loss();
  for (size_t i = 0; i < scales.size(); ++i) loss += scales[i] * logprobs[i];
  sums.loss += loss;
  sums.kl += loss / scales[0];
  return absl::OkStatus();
}

}  // namespace tandem::trainer
