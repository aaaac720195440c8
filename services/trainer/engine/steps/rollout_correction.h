// Corrections for a rollout whose probabilities are not the trainer's: importance weights of the
// whole batch, and rejected tokens. Pure logic, no tensors.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROLLOUT_CORRECTION_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROLLOUT_CORRECTION_H_

#include "absl/status/status.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

// Sets the importance weights of `rows` where they depend on the whole batch, and removes the rows
// of tokens that the objective rejects. `rows` come from PolicyRows and have their old
// log-probabilities, but no advantages yet.
absl::Status CorrectForRollout(const PolicyBatch& batch, TrainingRows& rows, Metrics& metrics);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_ROLLOUT_CORRECTION_H_
