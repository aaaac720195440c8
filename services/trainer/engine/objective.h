// What a train step optimises: the engine's side of tandem.trainer.v1.PolicyObjective. A new field
// of the contract is a field here (of a loss term: in common/loss/policy_loss.h), with its bounds
// in CheckObjective, a line in services/trainer/service/objective_convert.cc, and the code that
// uses it.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"

namespace tandem::trainer {

enum class AdvantageEstimator {
  kGroupRelative,
  kGroupRelativeNoStd,
  kLeaveOneOut,
  kGae,
  kProvided,
};

enum class OldLogprobs {
  kSenior,      // the senior's, as recorded
  kAuthor,      // the writer's, as recorded
  kRecomputed,  // the trainer's own before the update: ratio 1
  kProvided,    // with each sample
};

struct PolicyObjective {
  loss::PolicyLossOptions loss;
  double junior_token_loss_weight = 0.0;
  OldLogprobs old_logprobs = OldLogprobs::kSenior;
  AdvantageEstimator advantage_estimator = AdvantageEstimator::kGroupRelative;
  loss::LossScaleOptions scale;
  double junior_kl_coefficient = 0.0;  // lambda_jun; above 0 is UNIMPLEMENTED
  double gae_gamma = 1.0;
  double gae_lambda = 1.0;
  bool bootstrap_truncated = false;
  bool whiten_advantages = false;
  int64_t max_staleness = 0;

  bool operator==(const PolicyObjective&) const = default;
};

struct SupervisedObjective {
  loss::Aggregation aggregation = loss::Aggregation::kTokenMean;

  bool operator==(const SupervisedObjective&) const = default;
};

// The bounds of the numbers, and UNIMPLEMENTED for a choice that is not there yet; paths as in
// PolicyObjective of the contract.
inline absl::Status CheckObjective(const PolicyObjective& objective) {
  TANDEM_RETURN_IF_ERROR(loss::CheckPolicyLossOptions(objective.loss));
  TANDEM_RETURN_IF_ERROR(loss::CheckLossScaleOptions(objective.scale));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("junior_token_loss_weight", objective.junior_token_loss_weight, 0, 1));
  if (objective.junior_kl_coefficient > 0) {
    return FieldError(absl::StatusCode::kUnimplemented, "junior_kl_coefficient",
                      "the auxiliary KL towards the junior is not there yet");
  }
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("junior_kl_coefficient", objective.junior_kl_coefficient, 0));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_gamma", objective.gae_gamma, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_lambda", objective.gae_lambda, 0, 1));
  return CheckAtLeast("max_staleness", objective.max_staleness, 0);
}

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_OBJECTIVE_H_
