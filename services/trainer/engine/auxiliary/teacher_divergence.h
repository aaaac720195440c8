// The divergence of the model in training from a frozen model of the trainer, over the whole
// vocabulary.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_DIVERGENCE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_DIVERGENCE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loss/divergence.h"
#include "common/loss/logits/linear_divergence.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// Not thread-safe.
class TeacherDivergence {
 public:
  // `student` is this rank's shard of the output layer of the model in training. `teacher`, which
  // must outlive this, is whole; a rank computes its logits of the token ids of `student`.
  static absl::StatusOr<std::unique_ptr<TeacherDivergence>> Create(
      const parallel::OutputShard& student, const Model& teacher, int64_t logits_chunk_bytes);

  // Returns the divergences of the rows of `input`, and adds the gradient of their sum, weighted by
  // `scales`, to `gradients`. `input` is what the student has read, and `hidden` its hidden states,
  // without gradient; `temperatures` and `scales` have one number per row.
  absl::StatusOr<std::vector<double>> AddGradients(const training::MicroBatchInput& input,
                                                   const at::Tensor& hidden,
                                                   const loss::Divergence& divergence,
                                                   absl::Span<const double> temperatures,
                                                   absl::Span<const double> scales,
                                                   loss::OutputGradients& gradients);

 private:
  TeacherDivergence(const Model& teacher, std::unique_ptr<loss::LinearDivergenceLoss> loss)
      : teacher_(teacher), loss_(std::move(loss)) {}

  const Model& teacher_;
  const std::unique_ptr<loss::LinearDivergenceLoss> loss_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_DIVERGENCE_H_
