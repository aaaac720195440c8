// Checks that refuse a batch, with the field's path. Provenance fails closed: a trajectory without
// a complete mask, log-probs or versions is refused, and never trained on as ordinary GRPO.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_BATCH_CHECK_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_BATCH_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/model/passes/layer_cache.h"
#include "common/steps/sequence_check.h"
#include "common/steps/weights_lineage.h"
#include "services/trainer/engine/types.h"

namespace tandem::trainer {

struct BatchLimits {
  training::SequenceLimits sequence;
  int64_t max_samples = 0;
  int64_t version = 0;  // of the weights that the update starts from
  const training::WeightsLineage* lineage = nullptr;
  ObjectiveSupport support = {};
  RoutingCache routing = {};  // of the model; without layers if it has no experts
};

// Returns the batch without its stale samples: those with a token that is older than max_staleness
// allows, or of a version whose digest is no longer known.
PolicyBatch WithoutStale(const PolicyBatch& batch, const BatchLimits& limits);

// Return the errors of Engine::TrainStep, with paths that begin with "policy." or "samples[i].".
// Stale samples pass where the objective drops them.
absl::Status CheckPolicyBatch(const PolicyBatch& batch, const BatchLimits& limits);
absl::Status CheckSupervisedBatch(const SupervisedBatch& batch, const BatchLimits& limits);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_BATCH_CHECK_H_
