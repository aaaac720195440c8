#include "services/trainer/engine/steps/objective.h"

#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/tandem_config.h"

namespace tandem::trainer {
namespace {

absl::Status Lacks(const char* path, const char* message, const ErrorReason& reason) {
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, path, message), reason);
}

// Refuses what only a KL with a gradient can have.
absl::Status CheckRewardKl(const PolicyObjective& objective) {
  const loss::KlEstimator estimator = objective.loss.kl_estimator;
  if (estimator == loss::KlEstimator::kK1GradientK2 ||
      estimator == loss::KlEstimator::kK3GradientK2) {
    return InvalidField("kl_estimator",
                        "must be K1, K2 or K3 in the reward, which has no gradient");
  }
  if (objective.loss.kl_importance_correction) {
    return InvalidField("kl_importance_correction", "must be false with a KL in the reward");
  }
  if (objective.advantage_estimator == AdvantageEstimator::kProvided) {
    return InvalidField("kl_placement",
                        "must be LOSS with PROVIDED advantages, which do not use the reward");
  }
  return absl::OkStatus();
}

// Most of a teacher's tokens that a rollout server scores at each place.
constexpr int64_t kMaxTopK = 128;

absl::Status CheckDistillation(const DistillationOptions& distillation,
                               const ObjectiveSupport& support) {
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("coefficient", distillation.coefficient, 0, loss::kMaxCoefficient));
  const double beta = distillation.divergence.beta;
  if (!(beta > 0 && beta < 1)) {
    return InvalidField("beta", "must be above 0 and below 1: FORWARD and REVERSE are the limits");
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange("top_k", distillation.top_k, 0, kMaxTopK));
  TANDEM_RETURN_IF_ERROR(
      Validate(SamplingParams{.temperature = distillation.temperature}, /*num_token_ids=*/1));
  if (distillation.reads_model() && !support.teacher) {
    return Lacks("top_k", "0 needs a teacher in the trainer, but none is configured",
                 reason::kNoTeacherModel);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSupervisedObjective(const SupervisedObjective& objective,
                                      const ObjectiveSupport& support) {
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("distillation", CheckDistillation(objective.distillation, support)));
  if (objective.distillation.is_on() && support.frozen) {
    return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "distillation",
                                 "trains the model, but speculator.freeze_base_model is set"),
                      reason::kBaseModelFrozen);
  }
  TANDEM_RETURN_IF_ERROR(CheckInRange(
      "cross_entropy_coefficient", objective.cross_entropy_coefficient, 0, loss::kMaxCoefficient));
  if (objective.cross_entropy_coefficient == 0 && !objective.distillation.is_on()) {
    return InvalidField("cross_entropy_coefficient",
                        "must be above 0 without distillation: there would be no loss");
  }
  return absl::OkStatus();
}

absl::Status CheckObjective(const PolicyObjective& objective, const ObjectiveSupport& support) {
  if (support.frozen) {
    return WithReason(
        absl::FailedPreconditionError(
            "the trainer takes only supervised steps: speculator.freeze_base_model is set"),
        reason::kBaseModelFrozen);
  }
  TANDEM_RETURN_IF_ERROR(loss::CheckPolicyLossOptions(objective.loss));
  TANDEM_RETURN_IF_ERROR(loss::CheckLossScaleOptions(objective.scale));
  TANDEM_RETURN_IF_ERROR(loss::CheckRejectionOptions(objective.rejection));
  if (objective.importance_sampling_batch_normalize &&
      objective.loss.importance_sampling_cap == 0) {
    return InvalidField("importance_sampling_batch_normalize",
                        "needs an importance_sampling_cap: without one there are no weights");
  }
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("junior_token_loss_weight", objective.junior_token_loss_weight, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("junior_kl_coefficient", objective.junior_kl_coefficient, 0,
                                      loss::kMaxCoefficient));
  TANDEM_RETURN_IF_ERROR(CheckInRange("std_epsilon", objective.std_epsilon, 1e-12, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_gamma", objective.gae_gamma, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckInRange("gae_lambda", objective.gae_lambda, 0, 1));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("max_staleness", objective.max_staleness, 0));
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("value_clip", objective.value_clip, 0));
  TANDEM_RETURN_IF_ERROR(training::CheckUpdateOptions(objective.updates));
  if (objective.kl_placement == KlPlacement::kReward) {
    TANDEM_RETURN_IF_ERROR(CheckRewardKl(objective));
  }
  if (objective.gae_skip_junior_tokens && objective.junior_token_loss_weight > 0) {
    return InvalidField("gae_skip_junior_tokens",
                        "leaves junior tokens without an advantage: it needs "
                        "junior_token_loss_weight 0");
  }
  if (objective.advantage_estimator == AdvantageEstimator::kGae && !support.critic) {
    return Lacks("advantage_estimator", "GAE needs a critic, but none is configured",
                 reason::kNoCritic);
  }
  if (HasReferenceKl(objective) && objective.reference_logprobs == ReferenceLogprobs::kModel &&
      !support.reference) {
    return Lacks("kl_coefficient", "the KL needs a reference model, but none is configured",
                 reason::kNoReferenceModel);
  }
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("distillation", CheckDistillation(objective.distillation, support)));
  if (objective.junior_kl_coefficient > 0 &&
      objective.junior_kl_kind != TeacherDirection::kForwardSampled && !support.junior) {
    return Lacks("junior_kl_kind", "needs the junior in the trainer, but none is configured",
                 reason::kNoJuniorModel);
  }
  return absl::OkStatus();
}

}  // namespace tandem::trainer
