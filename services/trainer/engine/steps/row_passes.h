// Passes of the trainer's models over the rows of a batch: log-probabilities, and the gradients of
// an update.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROW_PASSES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROW_PASSES_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loss/logits/fused_output_loss.h"
#include "common/steps/mini_batches.h"
#include "services/trainer/engine/auxiliary/trainer_models.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// Return the log-probability of each row's label under the model in training, and under the
// reference model.
absl::StatusOr<std::vector<double>> SeniorLogProbs(TrainerModels& models, const TrainingRows& rows);
absl::StatusOr<std::vector<double>> ReferenceLogProbs(TrainerModels& models,
                                                      const TrainingRows& rows);

// Engine::ComputeLogProbs.
absl::StatusOr<training::BatchResults<LogProbsResult>> ComputeLogProbs(TrainerModels& models,
                                                                       const LogProbsBatch& batch);

// The loss of an update. Rows are numbered as in the batch's TrainingRows.
struct UpdateLoss {
  std::function<loss::TokenLoss> evaluate;
  loss::LossMode mode = loss::LossMode::kAuto;
  // Adds another loss of a micro-batch to the gradients; may be empty.
  std::function<absl::Status(const training::MicroBatchInput&, const at::Tensor& hidden,
                             loss::OutputGradients&)>
      add = nullptr;
};

// Leaves the gradients of the samples `range` of the batch with the strategy, and those of a
// speculator with it, and reports the number of micro-batches. Returns what the routers did.
absl::StatusOr<training::RouterSums> AddGradients(TrainerModels& models, const TrainingRows& rows,
                                                  const training::MiniBatch& range,
                                                  const UpdateLoss& update_loss,
                                                  StepReport& report);

// Leaves the gradients of the speculator, over all samples of the batch, and reports the number of
// micro-batches. The model, which is frozen, runs without gradients and computes no loss.
absl::Status AddSpeculatorGradients(TrainerModels& models, const TrainingRows& rows,
                                    StepReport& report);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROW_PASSES_H_
