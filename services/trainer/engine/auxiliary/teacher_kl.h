// The KL of a step's loss between the model in training and its teacher.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_KL_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_KL_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "services/trainer/engine/auxiliary/teacher_divergence.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/teacher.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// The KL term of one teacher. Not thread-safe.
class TeacherKl {
 public:
  // `senior` is this rank's shard of the senior's output layer, and `senior_loss`, which must
  // outlive this, reads it. On a rank that computes no output, and so adds no gradients, the weight
  // of `senior` is undefined and `senior_loss` null. `teacher`, which must outlive this, is whole;
  // a rank computes its logits of the token ids of `senior`. With a null `teacher` only
  // kForwardSampled is possible.
  static absl::StatusOr<std::unique_ptr<TeacherKl>> Create(
      const parallel::OutputShard& senior, const Model* teacher,
      loss::LinearCrossEntropyLoss* senior_loss, int64_t logits_chunk_bytes);

  // Adds the term of the rows `input.rows` of `rows` to the gradients and to `sums`. `teacher` has
  // the model of Create. `input` is what the senior has read, with the positions of these rows, and
  // `hidden` its hidden states, without gradient.
  absl::Status AddGradients(const Teacher& teacher, const training::MicroBatchInput& input,
                            const at::Tensor& hidden, const TaughtRows& rows,
                            loss::OutputGradients& gradients, TeacherKlSums& sums);

 private:
  explicit TeacherKl(loss::LinearCrossEntropyLoss* senior_loss) : senior_loss_(senior_loss) {}

  absl::Status AddSampled(const training::MicroBatchInput& input, const at::Tensor& hidden,
                          const TaughtRows& rows, loss::OutputGradients& gradients,
                          TeacherKlSums& sums);

  loss::LinearCrossEntropyLoss* const senior_loss_;
  // Null without a teacher, and on a rank that computes no output.
  std::unique_ptr<TeacherDivergence> divergence_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_TEACHER_KL_H_
