// What a train step optimises: the engine's side of tandem.trainer.v1.PolicyObjective. A new field
// of the contract is a field here (of a loss term: in common/loss/policy_loss.h), with its bounds
// in CheckObjective, a line each way in services/trainer/service/objective_convert.cc, and the code
// that uses it.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/loss/advantages.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"

namespace tandem::trainer {

enum class AdvantageEstimator {
  kGroupRelative,
  kGroupRelativeBatchStd,
  kGroupRelativeNoStd,
  kLeaveOneOut,
  kReinforcePlusPlus,
  kGae,
  kProvided,
};

// Whether an estimator compares the rewards of a group.
constexpr bool IsGrouped(AdvantageEstimator estimator) {
  return estimator != AdvantageEstimator::kReinforcePlusPlus &&
         estimator != AdvantageEstimator::kGae && estimator != AdvantageEstimator::kProvided;
}

enum class OldLogprobs {
  kSenior,      // the senior's, as recorded
  kAuthor,      // the writer's, as recorded
  kRecomputed,  // the trainer's own before the update: ratio 1
  kProvided,    // with each sample
};

// Of a sample with tokens that are older than max_staleness allows.
enum class StaleSamples {
  kRefuse,  // the whole step
  kDrop,    // as if the sample had not been sent
};

struct PolicyObjective {
  loss::PolicyLossOptions loss;
  double junior_token_loss_weight = 0.0;
  bool mask_truncated_completions = false;  // weight 0 for a response that was cut by length
  OldLogprobs old_logprobs = OldLogprobs::kSenior;
  AdvantageEstimator advantage_estimator = AdvantageEstimator::kGroupRelative;
  double std_epsilon = loss::kDefaultStdEpsilon;
  loss::LossScaleOptions scale;
  double junior_kl_coefficient = 0.0;  // lambda_jun; above 0 is UNIMPLEMENTED
  double gae_gamma = 1.0;
  double gae_lambda = 1.0;
  bool bootstrap_truncated = false;
  bool gae_skip_junior_tokens = false;
  bool whiten_advantages = false;
  int64_t max_staleness = 0;
  StaleSamples stale_samples = StaleSamples::kRefuse;

  bool operator==(const PolicyObjective&) const = default;
};

// Whether junior-written tokens are no steps of the trajectory: they have no advantage, and the
// critic does not learn on them.
constexpr bool SkipsJuniorTokens(const PolicyObjective& objective) {
  return objective.advantage_estimator == AdvantageEstimator::kGae &&
         objective.gae_skip_junior_tokens;
}

struct SupervisedObjective {
  loss::Aggregation aggregation = loss::Aggregation::kTokenMean;

  bool operator==(const SupervisedObjective&) const = default;
};

// What an objective may need of a trainer beside the model.
struct ObjectiveSupport {
  bool critic = false;
  bool reference = false;
};

// All that can be said before there are samples: the bounds of the numbers, UNIMPLEMENTED for a
// choice that is not there yet, FAILED_PRECONDITION (reasons NO_CRITIC, NO_REFERENCE_MODEL) for
// what this trainer lacks; paths as in PolicyObjective of the contract.
absl::Status CheckObjective(const PolicyObjective& objective, const ObjectiveSupport& support);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_
