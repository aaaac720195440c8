#include "services/trainer/engine/auxiliary/distiller.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"

namespace tandem::trainer {
namespace {

// Returns the numbers of the rows of `range` from k numbers for each row.
template <typename T>
absl::Span<const T> RowsOf(const std::vector<T>& numbers, int64_t k,
                           const training::RowRange& range) {
  const auto count = static_cast<size_t>(k);
  return absl::MakeConstSpan(numbers).subspan(range.begin * count, range.size() * count);
}

// Returns the teacher's mass outside of its tokens, summed over rows of k log-probabilities.
double TeacherRest(absl::Span<const float> logprobs, int64_t k) {
  double sum = 0;
  for (size_t row = 0; row < logprobs.size(); row += static_cast<size_t>(k)) {
    double mass = 0;
    for (const float x : logprobs.subspan(row, static_cast<size_t>(k))) {
      mass += std::exp(static_cast<double>(x));
    }
    sum += std::max(0.0, 1 - mass);
  }
  return sum;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Distiller>> Distiller::Create(
    const parallel::OutputShard& student, bool computes_output, const Model* teacher,
    int64_t logits_chunk_bytes, std::shared_ptr<loss::LogitsBuffer> own) {
  std::unique_ptr<Distiller> distiller(new Distiller);
  if (!computes_output) return distiller;
  if (teacher != nullptr) {
    TANDEM_ASSIGN_OR_RETURN(distiller->whole_,
                            TeacherDivergence::Create(student, *teacher, logits_chunk_bytes));
  }
  TANDEM_ASSIGN_OR_RETURN(distiller->top_tokens_,
                          loss::TopTokensDivergenceLoss::Create(
                              student.weight, {.logits_chunk_bytes = logits_chunk_bytes,
                                               .vocabulary = student.vocabulary,
                                               .soft_cap = student.soft_cap,
                                               .buffer = std::move(own)}));
  return distiller;
}

absl::Status Distiller::AddGradients(const DistillationOptions& distillation,
                                     const training::MicroBatchInput& input,
                                     const at::Tensor& hidden, const DistillationRows& rows,
                                     loss::OutputGradients& gradients, DistillationSums& sums) {
  if (input.rows.size() == 0) return absl::OkStatus();
  const absl::Span<const double> temperatures = input.rows.Of(rows.temperatures);
  const absl::Span<const double> scales = input.rows.Of(rows.scales);
  std::vector<double> divergences;
  if (distillation.reads_model()) {
    TANDEM_ASSIGN_OR_RETURN(
        divergences, whole_->AddGradients(input, hidden, distillation.divergence, temperatures,
                                          scales, gradients));
  } else {
    const int64_t k = rows.top_tokens.count;
    const absl::Span<const float> logprobs = RowsOf(rows.top_tokens.logprobs, k, input.rows);
    TANDEM_ASSIGN_OR_RETURN(
        loss::TopTokensDivergenceLoss::Result found,
        top_tokens_->ForwardBackward(hidden,
                                     {.positions = input.positions,
                                      .count = k,
                                      .ids = RowsOf(rows.top_tokens.ids, k, input.rows),
                                      .logprobs = logprobs,
                                      .temperatures = {temperatures.begin(), temperatures.end()}},
                                     distillation.divergence, scales, gradients));
    divergences = std::move(found.divergences);
    for (const double rest : found.rest) sums.student_rest += rest;
    sums.teacher_rest += TeacherRest(logprobs, k);
  }
  const absl::Span<const int32_t> teachers = input.rows.Of(rows.teachers);
  for (size_t row = 0; row < divergences.size(); ++row) {
    DistillationSums::OfTeacher& teacher = sums.teachers[static_cast<size_t>(teachers[row])];
    teacher.rows += 1;
    teacher.divergence += divergences[row];
    sums.loss += scales[row] * divergences[row];
  }
  return absl::OkStatus();
}

}  // namespace tandem::trainer
