#include "services/trainer/service/objective_convert.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem::trainer {
namespace {

absl::Status UnknownEnum(absl::string_view path, int value) {
  return InvalidField(path, absl::StrCat("unknown value ", value));
}

absl::StatusOr<loss::Aggregation> AggregationFromProto(v1::Aggregation proto) {
  switch (proto) {
    case v1::AGGREGATION_UNSPECIFIED:
    case v1::AGGREGATION_TOKEN_MEAN:
      return loss::Aggregation::kTokenMean;
    case v1::AGGREGATION_TOKEN_SUM:
      return loss::Aggregation::kTokenSum;
    case v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM:
      return loss::Aggregation::kSeqMeanTokenSum;
    case v1::AGGREGATION_SEQ_MEAN_TOKEN_MEAN:
      return loss::Aggregation::kSeqMeanTokenMean;
    case v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM_NORM:
      return loss::Aggregation::kSeqMeanTokenSumNorm;
    default:
      return UnknownEnum("aggregation", proto);
  }
}

absl::StatusOr<loss::Normalizer> NormalizerFromProto(v1::Normalizer proto) {
  switch (proto) {
    case v1::NORMALIZER_ALL_TOKENS:
      return loss::Normalizer::kAllTokens;
    case v1::NORMALIZER_UNSPECIFIED:
    case v1::NORMALIZER_NONZERO_WEIGHT:
      return loss::Normalizer::kNonzeroWeight;
    case v1::NORMALIZER_SUM_OF_WEIGHTS:
      return loss::Normalizer::kSumOfWeights;
    default:
      return UnknownEnum("normalizer", proto);
  }
}

absl::StatusOr<loss::PolicyLossKind> LossKindFromProto(v1::PolicyLossKind proto) {
  switch (proto) {
    case v1::POLICY_LOSS_KIND_UNSPECIFIED:
    case v1::POLICY_LOSS_KIND_PPO_CLIP:
      return loss::PolicyLossKind::kPpoClip;
    case v1::POLICY_LOSS_KIND_GSPO:
      return loss::PolicyLossKind::kGspo;
    case v1::POLICY_LOSS_KIND_CISPO:
      return loss::PolicyLossKind::kCispo;
    default:
      return UnknownEnum("loss_kind", proto);
  }
}

absl::StatusOr<loss::KlEstimator> KlEstimatorFromProto(v1::KlEstimator proto) {
  switch (proto) {
    case v1::KL_ESTIMATOR_K1:
      return loss::KlEstimator::kK1;
    case v1::KL_ESTIMATOR_K2:
      return loss::KlEstimator::kK2;
    case v1::KL_ESTIMATOR_UNSPECIFIED:
    case v1::KL_ESTIMATOR_K3:
      return loss::KlEstimator::kK3;
    case v1::KL_ESTIMATOR_K1_GRADIENT_K2:
      return loss::KlEstimator::kK1GradientK2;
    case v1::KL_ESTIMATOR_K3_GRADIENT_K2:
      return loss::KlEstimator::kK3GradientK2;
    default:
      return UnknownEnum("kl_estimator", proto);
  }
}

absl::StatusOr<OldLogprobs> OldLogprobsFromProto(v1::OldLogprobs proto) {
  switch (proto) {
    case v1::OLD_LOGPROBS_UNSPECIFIED:
    case v1::OLD_LOGPROBS_SENIOR:
      return OldLogprobs::kSenior;
    case v1::OLD_LOGPROBS_AUTHOR:
      return OldLogprobs::kAuthor;
    case v1::OLD_LOGPROBS_RECOMPUTED:
      return OldLogprobs::kRecomputed;
    case v1::OLD_LOGPROBS_PROVIDED:
      return OldLogprobs::kProvided;
    default:
      return UnknownEnum("old_logprobs", proto);
  }
}

absl::StatusOr<AdvantageEstimator> AdvantageEstimatorFromProto(v1::AdvantageEstimator proto) {
  switch (proto) {
    case v1::ADVANTAGE_ESTIMATOR_UNSPECIFIED:
    case v1::ADVANTAGE_ESTIMATOR_GROUP_RELATIVE:
      return AdvantageEstimator::kGroupRelative;
    case v1::ADVANTAGE_ESTIMATOR_GROUP_RELATIVE_NO_STD:
      return AdvantageEstimator::kGroupRelativeNoStd;
    case v1::ADVANTAGE_ESTIMATOR_LEAVE_ONE_OUT:
      return AdvantageEstimator::kLeaveOneOut;
    case v1::ADVANTAGE_ESTIMATOR_GAE:
      return AdvantageEstimator::kGae;
    case v1::ADVANTAGE_ESTIMATOR_PROVIDED:
      return AdvantageEstimator::kProvided;
    default:
      return UnknownEnum("advantage_estimator", proto);
  }
}

// The clip, KL, entropy and importance terms.
absl::Status LossTermsFromProto(const v1::PolicyObjective& proto, loss::PolicyLossOptions* out) {
  TANDEM_ASSIGN_OR_RETURN(out->kind, LossKindFromProto(proto.loss_kind()));
  if (proto.has_clip_ratio_low()) out->clip_ratio_low = proto.clip_ratio_low();
  if (proto.has_clip_ratio_high()) out->clip_ratio_high = proto.clip_ratio_high();
  out->dual_clip = proto.dual_clip();
  out->kl_coefficient = proto.kl_coefficient();
  TANDEM_ASSIGN_OR_RETURN(out->kl_estimator, KlEstimatorFromProto(proto.kl_estimator()));
  out->entropy_coefficient = proto.entropy_coefficient();
  out->importance_sampling_cap = proto.importance_sampling_cap();
  return absl::OkStatus();
}

absl::Status ScaleFromProto(const v1::PolicyObjective& proto, loss::LossScaleOptions* out) {
  TANDEM_ASSIGN_OR_RETURN(out->aggregation, AggregationFromProto(proto.aggregation()));
  TANDEM_ASSIGN_OR_RETURN(out->normalizer, NormalizerFromProto(proto.normalizer()));
  out->norm_constant = proto.norm_constant();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PolicyObjective> FromProto(const v1::PolicyObjective& proto) {
  PolicyObjective out;
  TANDEM_RETURN_IF_ERROR(LossTermsFromProto(proto, &out.loss));
  TANDEM_RETURN_IF_ERROR(ScaleFromProto(proto, &out.scale));
  out.junior_token_loss_weight = proto.junior_token_loss_weight();
  TANDEM_ASSIGN_OR_RETURN(out.old_logprobs, OldLogprobsFromProto(proto.old_logprobs()));
  TANDEM_ASSIGN_OR_RETURN(out.advantage_estimator,
                          AdvantageEstimatorFromProto(proto.advantage_estimator()));
  out.junior_kl_coefficient = proto.junior_kl_coefficient();
  if (proto.has_gae_gamma()) out.gae_gamma = proto.gae_gamma();
  if (proto.has_gae_lambda()) out.gae_lambda = proto.gae_lambda();
  out.bootstrap_truncated = proto.bootstrap_truncated();
  out.whiten_advantages = proto.whiten_advantages();
  out.max_staleness = proto.max_staleness();
  return out;
}

absl::StatusOr<SupervisedObjective> FromProto(const v1::SupervisedObjective& proto) {
  SupervisedObjective out;
  TANDEM_ASSIGN_OR_RETURN(out.aggregation, AggregationFromProto(proto.aggregation()));
  if (out.aggregation == loss::Aggregation::kSeqMeanTokenSumNorm) {
    return InvalidField("aggregation", "SEQ_MEAN_TOKEN_SUM_NORM needs a policy objective");
  }
  return out;
}

}  // namespace tandem::trainer
