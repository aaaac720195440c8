// The trainer engine: GRPO-family and supervised training of the senior. Plain structs, no tensors,
// no gRPC.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/weights/weight_transfer.h"
#include "services/trainer/engine/auxiliary/critic_connection.h"
#include "services/trainer/engine/types.h"
#include "services/training_core/engine.h"

namespace tandem::trainer {

class Engine : public training::Engine {
 public:
  // Makes the optimizer updates of one step. An error leaves the trainer unchanged (with GAE the
  // critic may have learnt the step; it gives a repeat the same values): INVALID_ARGUMENT with the
  // field's path ("samples[3].trajectory.authorship_mask", "policy.kl_coefficient", "run_id"),
  // OUT_OF_RANGE for a batch or sequence that is too long, FAILED_PRECONDITION (reasons
  // STALE_POLICY_VERSION, TRAJECTORY_TOO_OLD, UNKNOWN_POLICY_VERSION, WEIGHTS_DIFFER, NO_CRITIC,
  // NO_REFERENCE_MODEL, BASE_MODEL_FROZEN), ALREADY_EXISTS (reason REQUEST_ID_REUSED),
  // UNIMPLEMENTED. A step whose loss or gradient is not finite is skipped, also where that is the
  // critic's. A step that has begun is finished even if its caller leaves, unless it waits for the
  // critic.
  virtual absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                               const TrainStepRequest& request) = 0;

  // Returns the log-probabilities and entropies of responses under the current weights. A request
  // is refused with INVALID_ARGUMENT and the field, or OUT_OF_RANGE for a sequence that is too
  // long.
  using LogProbsResults = training::BatchResults<LogProbsResult>;
  virtual absl::StatusOr<LogProbsResults> ComputeLogProbs(const CallScope& call,
                                                          const LogProbsBatch& batch) = 0;

  // Returns a copy of the current weights, for publishing. It has those of the speculator, too.
  virtual absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot(
      const CallScope& call, const SnapshotRequest& request) = 0;
};

// Loads the model; blocks. With a null `critic` GAE is refused.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
