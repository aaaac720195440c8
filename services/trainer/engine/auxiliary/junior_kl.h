// The auxiliary KL towards the junior on the tokens that it wrote: lambda_jun of arXiv 2606.28166.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_JUNIOR_KL_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_JUNIOR_KL_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/logits/linear_divergence.h"
#include "common/model/model.h"
#include "common/parallel/strategy.h"
#include "services/trainer/engine/steps/objective.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// The KL term of a step's loss. Not thread-safe.
class JuniorKl {
 public:
  // `senior` is this rank's shard of the senior's output layer, and `senior_loss`, which must
  // outlive this, reads it. On a rank that computes no output, and so adds no gradients, the weight
  // of `senior` is undefined and `senior_loss` null. `junior` is whole; a rank computes its logits
  // of the token ids of `senior`. With a null `junior` only kForwardSampled is possible.
  static absl::StatusOr<std::unique_ptr<JuniorKl>> Create(const parallel::OutputShard& senior,
                                                          std::unique_ptr<Model> junior,
                                                          loss::LinearCrossEntropyLoss* senior_loss,
                                                          int64_t logits_chunk_bytes);

  bool has_junior() const { return junior_ != nullptr; }
  const Model* junior() const { return junior_.get(); }  // may be null

  // Adds the term of the rows `input.rows` of `rows` to the gradients and to `sums`. `input` is
  // what the senior has read, with the positions of these rows, and `hidden` its hidden states,
  // without gradient.
  absl::Status AddGradients(const training::MicroBatchInput& input, const at::Tensor& hidden,
                            const JuniorRows& rows, JuniorKlKind kind,
                            loss::OutputGradients& gradients, JuniorKlSums& sums);

 private:
  JuniorKl(std::unique_ptr<Model> junior, loss::LinearCrossEntropyLoss* senior_loss)
      : junior_(std::move(junior)), senior_loss_(senior_loss) {}

  absl::Status AddSampled(const training::MicroBatchInput& input, const at::Tensor& hidden,
                          const JuniorRows& rows, loss::OutputGradients& gradients,
                          JuniorKlSums& sums);

  const std::unique_ptr<Model> junior_;
  loss::LinearCrossEntropyLoss* const senior_loss_;
  // Null without a junior, and on a rank that computes no output.
  std::unique_ptr<loss::LinearDivergenceLoss> divergence_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_JUNIOR_KL_H_
