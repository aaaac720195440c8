// One supervised step: cross-entropy of every response token, times its weight. Where the model is
// frozen, its speculator's update alone.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_SUPERVISED_STEP_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_SUPERVISED_STEP_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/trainer/engine/auxiliary/trainer_models.h"
#include "services/trainer/engine/steps/batch_check.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// The supervised step of one request. Must live as long as the updates that Prepare returns, and
// the constructor's arguments longer.
class SupervisedStep {
 public:
  SupervisedStep(TrainerModels& models, const BatchLimits& limits, const SupervisedBatch& batch,
                 const Blobs& blobs)
      : models_(models), limits_(limits), batch_(batch), blobs_(blobs) {}

  // Checks the batch and returns its update: the `prepare` of TrainingCore::Step.
  absl::StatusOr<std::vector<training::TrainingCore::UpdateGradients>> Prepare(StepReport& report);

 private:
  absl::Status AddUpdate(StepReport& report);

  TrainerModels& models_;
  const BatchLimits limits_;
  const SupervisedBatch& batch_;
  const Blobs& blobs_;  // of its images
  TrainingRows rows_;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_SUPERVISED_STEP_H_
