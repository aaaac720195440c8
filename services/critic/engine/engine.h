// The critic engine: a value head on any model. Plain structs, no tensors, no gRPC.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "services/critic/engine/types.h"
#include "services/training_core/engine.h"

namespace tandem::critic {

class Engine : public training::Engine {
 public:
  // Whether the value head was in the model's directory; otherwise it is drawn from the seed.
  virtual bool value_head_from_checkpoint() const = 0;

  // Returns the values of sequences; value t is computed from hidden state prompt + t - 1. Values
  // for a train step are kept: a repeat for the same step and tokens gets the same values, even
  // after the step has been learnt. A request is refused with INVALID_ARGUMENT and the field, or
  // OUT_OF_RANGE for a sequence that is too long, or more sequences than a step may hold.
  using ValuesResults = training::BatchResults<ValuesResult>;
  virtual absl::StatusOr<ValuesResults> ComputeValues(const CallScope& call,
                                                      const ValuesBatch& batch) = 0;

  // Makes the optimizer updates of one step. Errors, fencing and replay are as in the trainer's
  // engine, with paths that begin with "samples[i].".
  virtual absl::StatusOr<StepResult> TrainStep(const CallScope& call,
                                               const TrainStepRequest& request) = 0;
};

// Loads the model; blocks.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_
