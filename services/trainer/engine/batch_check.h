// Refuses batches that must not be trained on, with the field's path. Provenance fails closed: a
// trajectory without a complete mask, log-probs or versions is never treated as ordinary GRPO.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_BATCH_CHECK_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_BATCH_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/training/sequence_check.h"
#include "services/trainer/engine/engine.h"

namespace tandem::trainer {

struct BatchLimits {
  training::SequenceLimits sequence;
  int64_t max_samples = 0;
  int64_t policy_version = 0;  // of the weights that the update starts from
  bool has_critic = false;
  bool has_reference = false;
};

// The bounds of the numbers, and UNIMPLEMENTED for a choice that is not there yet; paths as in
// PolicyObjective of the contract.
absl::Status CheckObjective(const PolicyObjective& objective);

// Codes as Engine::TrainStep names them; paths from "policy." or "samples[i]." on.
absl::Status CheckPolicyBatch(const PolicyBatch& batch, const BatchLimits& limits);
absl::Status CheckSupervisedBatch(const SupervisedBatch& batch, const BatchLimits& limits);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_BATCH_CHECK_H_
