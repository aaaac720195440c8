// The distillation of a step: the divergence of the model in training from its teachers, on the
// rows of its own loss.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_DISTILLER_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_DISTILLER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loss/logits/fused_output_loss.h"
#include "common/loss/logits/top_tokens_divergence.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "services/trainer/engine/auxiliary/teacher_divergence.h"
#include "services/trainer/engine/steps/objective.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// Not thread-safe.
class Distiller {
 public:
  // `student` is this rank's shard of the output layer of the model in training, undefined on a
  // rank that computes no output, and so adds no gradients. With a null `teacher`, which must
  // outlive this, only a distillation from tokens of the samples is possible, whose logits are in
  // `own`, the memory of the model's own loss.
  static absl::StatusOr<std::unique_ptr<Distiller>> Create(const parallel::OutputShard& student,
                                                           bool computes_output,
                                                           const Model* teacher,
                                                           int64_t logits_chunk_bytes,
                                                           std::shared_ptr<loss::LogitsBuffer> own);

  // Adds the term of the rows `input.rows` of `rows` to the gradients and to `sums`, which has the
  // teachers of `rows`. `input` is what the student has read, and `hidden` its hidden states,
  // without gradient.
  absl::Status AddGradients(const DistillationOptions& distillation,
                            const training::MicroBatchInput& input, const at::Tensor& hidden,
                            const DistillationRows& rows, loss::OutputGradients& gradients,
                            DistillationSums& sums);

 private:
  Distiller() = default;

  // Null without a teacher, and on a rank that computes no output.
  std::unique_ptr<TeacherDivergence> whole_;
  // Null on a rank that computes no output.
  std::unique_ptr<loss::TopTokensDivergenceLoss> top_tokens_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_DISTILLER_H_
