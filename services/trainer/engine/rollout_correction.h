// What a batch needs because its rollout's probabilities are not the trainer's: weights of the
// whole batch, and tokens that are left out. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_ROLLOUT_CORRECTION_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_ROLLOUT_CORRECTION_H_

#include "absl/status/status.h"
#include "services/trainer/engine/step_metrics.h"
#include "services/trainer/engine/training_rows.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

// Sets the importance weights of `rows` where they depend on the batch, and takes the rows of the
// tokens out that the objective rejects. `rows` are those of PolicyRows with their old
// log-probabilities, without advantages.
absl::Status CorrectForRollout(const PolicyBatch& batch, TrainingRows& rows, Metrics& metrics);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_ROLLOUT_CORRECTION_H_
