#include "services/trainer/engine/objective.h"

#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"

namespace tandem::trainer {
namespace {

absl::Status Lacks(const char* path, const char* message, const ErrorReason& reason) {
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, path, message), reason);
}

}  // namespace

absl::Status CheckObjective(const PolicyObjective& objective, const ObjectiveSupport& support) {
  TANDEM_RETURN_IF_ERROR(loss::CheckPolicyLossOptions(objective.loss));
  TANDEM_RETURN_IF_ERROR(loss::CheckLossScaleOptions(objective.scale));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("junior_token_loss_weight", objective.junior_token_loss_weight, 0, 1));
  if (objective.junior_kl_coefficient > 0) {
    return FieldError(absl::StatusCode::kUnimplemented, "junior_kl_coefficient",
                      "the auxiliary KL towards the junior is not there yet");
  }
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("junior_kl_coefficient", objective.junior_kl_coefficient, 0));
  TANDEM_RETURN_IF_ERROR(CheckInRange("std_epsilon", objective.std_epsilon, 1e-12, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_gamma", objective.gae_gamma, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_lambda", objective.gae_lambda, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_staleness", objective.max_staleness, 0));
  if (objective.gae_skip_junior_tokens && objective.junior_token_loss_weight > 0) {
    return InvalidField("gae_skip_junior_tokens",
                        "leaves junior tokens without an advantage: it needs "
                        "junior_token_loss_weight 0");
  }
  if (objective.advantage_estimator == AdvantageEstimator::kGae && !support.critic) {
    return Lacks("advantage_estimator", "GAE needs a critic, and none is configured",
                 reason::kNoCritic);
  }
  if (objective.loss.kl_coefficient > 0 && !support.reference) {
    return Lacks("kl_coefficient", "the KL needs a reference model, and none is configured",
                 reason::kNoReferenceModel);
  }
  return absl::OkStatus();
}

}  // namespace tandem::trainer
