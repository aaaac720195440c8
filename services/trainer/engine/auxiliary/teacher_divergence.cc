#include "services/trainer/engine/auxiliary/teacher_divergence.h"

#include <ATen/core/grad_mode.h>

#include "common/base/errors/status_macros.h"
#include "common/ops/linear/low_rank_adapter.h"

namespace tandem::trainer {

absl::StatusOr<std::unique_ptr<TeacherDivergence>> TeacherDivergence::Create(
    const parallel::OutputShard& student, const Model& teacher, int64_t logits_chunk_bytes) {
  ops::MatrixRows teacher_weight = teacher.output_weight();
  if (!student.vocabulary.is_whole()) {
    teacher_weight = teacher_weight.Narrow(student.vocabulary.first, student.weight.size(0));
  }
  TANDEM_ASSIGN_OR_RETURN(
      std::unique_ptr<loss::LinearDivergenceLoss> loss,
      loss::LinearDivergenceLoss::Create(student.weight, teacher_weight,
                                         {.logits_chunk_bytes = logits_chunk_bytes,
                                          .vocabulary = student.vocabulary,
                                          .soft_cap = student.soft_cap,
                                          .teacher_soft_cap = teacher.logit_soft_cap()}));
  return std::unique_ptr<TeacherDivergence>(new TeacherDivergence(teacher, std::move(loss)));
}

absl::StatusOr<std::vector<double>> TeacherDivergence::AddGradients(
    const training::MicroBatchInput& input, const at::Tensor& hidden,
    const loss::Divergence& divergence, absl::Span<const double> temperatures,
    absl::Span<const double> scales, loss::OutputGradients& gradients) {
  const at::NoGradGuard no_grad;
  const ops::WithoutAdapters base;  // the teacher may be what the student's adapters adapt
  CausalContext context;
  RaggedBatch batch = input.batch;
  batch.routing = {};  // is the student's
  const at::Tensor teacher_hidden = teacher_.HiddenStates(batch, context);
  return loss_->ForwardBackward(
      hidden, teacher_hidden,
      {.positions = input.positions, .temperatures = {temperatures.begin(), temperatures.end()}},
      divergence, scales, gradients);
}

}  // namespace tandem::trainer
