// The objective of a train step, as the engine takes tandem.trainer.v1.PolicyObjective.
//
// To add a field, follow "Add an objective field" in docs/internals/architecture.md.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_STEPS_OBJECTIVE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_STEPS_OBJECTIVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/coauthoring/author.h"
#include "common/loss/advantages.h"
#include "common/loss/divergence.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "common/loss/rollout_correction.h"
#include "common/loss/value_loss.h"
#include "common/steps/mini_batches.h"

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

// Whether the estimator compares the rewards of a group.
constexpr bool IsGrouped(AdvantageEstimator estimator) {
  return estimator != AdvantageEstimator::kReinforcePlusPlus &&
         estimator != AdvantageEstimator::kGae && estimator != AdvantageEstimator::kProvided;
}

enum class OldLogprobs {
  kSenior,      // the senior's, as the rollout recorded them
  kAuthor,      // the writer's, as the rollout recorded them
  kRecomputed,  // the trainer's, before the first update
  kProvided,    // sent with each sample
};

// Where the KL to the reference goes: added to the loss, or subtracted from the reward of each
// token.
enum class KlPlacement { kLoss, kReward };

// Where the reference's log-probabilities come from: the trainer's reference model, or each sample.
enum class ReferenceLogprobs { kModel, kProvided };

// The KL between the distribution p of the model in training and q of its teacher, the junior.
enum class TeacherDirection {
  kReverse,         // KL(p || q), whole vocabulary
  kForward,         // KL(q || p), whole vocabulary
  kForwardSampled,  // log q(y) - log p(y) of the token
};

// The treatment of a sample with tokens that are older than max_staleness allows.
enum class StaleSamples {
  kRefuse,  // the step is refused
  kDrop,    // the sample is left out
};

// A divergence from a teacher that is added to the loss of every token with a weight.
struct DistillationOptions {
  double coefficient = 0;  // 0: no distillation
  loss::Divergence divergence = {};
  int64_t top_k = 0;       // tokens that samples bring; 0: all, of the trainer's teacher model
  double temperature = 0;  // of both models; 0: that of the trajectory

  bool is_on() const { return coefficient > 0; }
  // Whether the teacher is the trainer's model.
  bool reads_model() const { return is_on() && top_k == 0; }

  bool operator==(const DistillationOptions&) const = default;
};

struct PolicyObjective {
  loss::PolicyLossOptions loss;
  double junior_token_loss_weight = 0.0;
  bool mask_truncated_completions = false;  // weight 0 for a response that was cut by length
  OldLogprobs old_logprobs = OldLogprobs::kSenior;
  AdvantageEstimator advantage_estimator = AdvantageEstimator::kGroupRelative;
  double std_epsilon = loss::kDefaultStdEpsilon;
  loss::LossScaleOptions scale;
  KlPlacement kl_placement = KlPlacement::kLoss;
  ReferenceLogprobs reference_logprobs = ReferenceLogprobs::kModel;
  double junior_kl_coefficient = 0.0;  // lambda_jun
  TeacherDirection junior_kl_kind = TeacherDirection::kReverse;
  double gae_gamma = 1.0;
  double gae_lambda = 1.0;
  bool bootstrap_truncated = false;
  bool gae_skip_junior_tokens = false;
  bool whiten_advantages = false;
  int64_t max_staleness = 0;
  StaleSamples stale_samples = StaleSamples::kRefuse;
  training::UpdateOptions updates;
  double value_clip = loss::kDefaultValueClip;  // for the critic
  bool importance_sampling_batch_normalize = false;
  loss::RejectionOptions rejection;
  bool routing_replay = false;  // tokens take the experts that the trajectory recorded
  DistillationOptions distillation;

  bool operator==(const PolicyObjective&) const = default;
};

// Whether junior-written tokens are not steps of the trajectory: they have no advantage, and the
// critic does not learn on them.
constexpr bool SkipsJuniorTokens(const PolicyObjective& objective) {
  return objective.advantage_estimator == AdvantageEstimator::kGae &&
         objective.gae_skip_junior_tokens;
}

// Whether the tokens of an author are steps of the trajectory.
constexpr bool IsStep(const PolicyObjective& objective, Author author) {
  return IsPolicy(author) || (IsDrawn(author) && !SkipsJuniorTokens(objective));
}

// Whether the KL to the reference is part of the objective, of the reward, of the loss.
constexpr bool HasReferenceKl(const PolicyObjective& objective) {
  return objective.loss.kl_coefficient > 0;
}
constexpr bool PenalisesReward(const PolicyObjective& objective) {
  return HasReferenceKl(objective) && objective.kl_placement == KlPlacement::kReward;
}

constexpr bool HasLossKl(const PolicyObjective& objective) {
  return HasReferenceKl(objective) && objective.kl_placement == KlPlacement::kLoss;
}

// Whether tokens are rejected for their distance from the rollout.
constexpr bool RejectsTokens(const PolicyObjective& objective) {
  return objective.rejection.upper > 0;
}

struct SupervisedObjective {
  loss::Aggregation aggregation = loss::Aggregation::kTokenMean;
  DistillationOptions distillation = {};
  double cross_entropy_coefficient = 1.0;

  bool operator==(const SupervisedObjective&) const = default;
};

// The servers and models that a trainer has beside its own model, and that objectives may need.
struct ObjectiveSupport {
  bool critic = false;
  bool reference = false;
  bool junior = false;
  bool teacher = false;
  bool frozen = false;  // its own model: no objective of a policy can be trained
};

// Checks all that needs no samples. INVALID_ARGUMENT for a number out of bounds, UNIMPLEMENTED for
// a choice that is not implemented, FAILED_PRECONDITION (reasons NO_CRITIC, NO_REFERENCE_MODEL,
// NO_JUNIOR_MODEL, NO_TEACHER_MODEL, BASE_MODEL_FROZEN) for a need that `support` lacks; paths as
// in the objectives of the contract.
absl::Status CheckObjective(const PolicyObjective& objective, const ObjectiveSupport& support);
absl::Status CheckSupervisedObjective(const SupervisedObjective& objective,
                                      const ObjectiveSupport& support);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_STEPS_OBJECTIVE_H_
