// The trainer engine: GRPO-family and supervised training of the senior. Plain structs, no tensors,
// no gRPC.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/tensor/weight_transfer.h"
#include "services/trainer/engine/critic_connection.h"
#include "services/trainer/engine/types.h"
#include "services/training/engine.h"

namespace tandem::trainer {

class Engine : public training::Engine {
 public:
  // One optimizer update over the whole batch. Fails closed, with nothing changed here (with GAE
  // the critic may have learnt the step, and gives a repeat the same values): INVALID_ARGUMENT with
  // the field's path ("samples[3].trajectory.authorship_mask", "policy.kl_coefficient", "run_id"),
  // OUT_OF_RANGE too long, FAILED_PRECONDITION (reasons STALE_POLICY_VERSION, TRAJECTORY_TOO_OLD,
  // UNKNOWN_POLICY_VERSION, WEIGHTS_DIFFER, NO_CRITIC, NO_REFERENCE_MODEL), ALREADY_EXISTS (reason
  // REQUEST_ID_REUSED), UNIMPLEMENTED. A step whose loss or gradient is not finite, the critic's
  // too, is skipped. A step that has begun is finished even when its caller goes, unless it still
  // waits for the critic.
  virtual absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                               const TrainStepRequest& request) = 0;

  virtual absl::StatusOr<LogProbsResult> ComputeLogProbs(const CallScope& call,
                                                         const LogProbsRequest& request) = 0;

  // A copy of the current weights, for publishing.
  virtual absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(const CallScope& call) = 0;
};

// Loads the model (blocks). `critic` may be null: GAE is then refused.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
