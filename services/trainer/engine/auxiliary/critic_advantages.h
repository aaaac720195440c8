// Generalized advantages, with the values of the critic server.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_ADVANTAGES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_ADVANTAGES_H_

#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "services/trainer/engine/auxiliary/critic_connection.h"
#include "services/trainer/engine/steps/step_metrics.h"
#include "services/trainer/engine/steps/training_rows.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/training_core.h"

namespace tandem::trainer {

// Asks the critic for the values of `batch`, has it learn the returns, and returns the advantages;
// adds the critic's metrics to `metrics`, and the seconds of its calls to `seconds`. Every rank
// calls this; rank 0 alone talks to the critic. Errors are the critic's.
absl::StatusOr<Advantages> CriticAdvantages(training::TrainingCore& core, CriticConnection& critic,
                                            const CallScope& call, const TrainStepRequest& request,
                                            const PolicyBatch& batch, const TokenNumbers& penalties,
                                            Metrics& metrics, double& seconds);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_ADVANTAGES_H_
