#include "services/trainer/service/convert.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/field_check.h"
#include "common/base/status_macros.h"
#include "common/rpc/float_field.h"
#include "common/rpc/proto_convert.h"
#include "services/trainer/engine/batch_check.h"

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
  // Without a coefficient the reference model is not even run.
  if (out->kl_coefficient == 0) out->kl_estimator = loss::KlEstimator::kNone;
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

absl::StatusOr<Trajectory> TrajectoryFromProto(const types::v1::Trajectory& proto) {
  TANDEM_ASSIGN_OR_RETURN(Trajectory out, rpc::TrajectoryFromProto(proto));
  TANDEM_RETURN_IF_ERROR(CheckFinite("author_logprobs", out.author_logprobs));
  TANDEM_RETURN_IF_ERROR(CheckFinite("other_logprobs", out.other_logprobs));
  TANDEM_RETURN_IF_ERROR(CheckFinite("log_keep_mass", out.log_keep_mass));
  return out;
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

absl::StatusOr<StepHeader> FromProto(const v1::TrainStepHeader& proto, int64_t max_samples) {
  StepHeader out;
  if (proto.run_id().empty()) return InvalidField("run_id", "is required");
  if (proto.request_id().empty()) return InvalidField("request_id", "is required");
  if (proto.step() < 0) return InvalidField("step", "must not be negative");
  if (proto.num_samples() < 1) {
    return InvalidField("num_samples",
                        absl::StrCat("must be at least 1, got ", proto.num_samples()));
  }
  if (proto.num_samples() > max_samples) {
    return FieldError(
        absl::StatusCode::kOutOfRange, "num_samples",
        absl::StrCat(proto.num_samples(), " samples, at most ", max_samples, " are accepted"));
  }
  out.run_id = proto.run_id();
  out.step = proto.step();
  out.request_id = proto.request_id();
  out.expected_version = proto.expected_version();
  out.num_samples = proto.num_samples();
  switch (proto.objective_case()) {
    case v1::TrainStepHeader::kPolicy: {
      auto objective = FromProto(proto.policy());
      if (!objective.ok()) return PrependFieldPath("policy", objective.status());
      // The engine looks at it again; here it is refused before the samples are sent.
      TANDEM_RETURN_IF_ERROR(PrependFieldPath("policy", CheckObjective(*objective)));
      out.objective = *std::move(objective);
      return out;
    }
    case v1::TrainStepHeader::kSupervised: {
      auto objective = FromProto(proto.supervised());
      if (!objective.ok()) return PrependFieldPath("supervised", objective.status());
      out.objective = *std::move(objective);
      return out;
    }
    case v1::TrainStepHeader::OBJECTIVE_NOT_SET:
      break;
  }
  return InvalidField("objective", "is required: policy or supervised");
}

absl::StatusOr<PolicySample> FromProto(const v1::PolicySample& proto) {
  PolicySample out;
  if (!proto.has_trajectory()) return InvalidField("trajectory", "is required");
  auto trajectory = TrajectoryFromProto(proto.trajectory());
  if (!trajectory.ok()) return PrependFieldPath("trajectory", trajectory.status());
  out.trajectory = *std::move(trajectory);
  out.group_id = proto.group_id();
  if (proto.has_reward()) {
    TANDEM_RETURN_IF_ERROR(CheckFinite("reward", proto.reward()));
    out.reward = proto.reward();
  }
  const auto length = static_cast<int64_t>(out.trajectory.response_token_ids.size());
  if (proto.has_advantages()) {
    TANDEM_ASSIGN_OR_RETURN(out.advantages,
                            rpc::FloatField("advantages", proto.advantages(), length));
  }
  if (proto.has_old_logprobs()) {
    TANDEM_ASSIGN_OR_RETURN(out.old_logprobs,
                            rpc::FloatField("old_logprobs", proto.old_logprobs(), length));
  }
  return out;
}

absl::StatusOr<SupervisedSample> FromProto(const v1::SupervisedSample& proto) {
  if (proto.prompt_token_ids().empty()) return InvalidField("prompt_token_ids", "is empty");
  if (proto.response_token_ids().empty()) return InvalidField("response_token_ids", "is empty");
  SupervisedSample out;
  out.prompt_token_ids.assign(proto.prompt_token_ids().begin(), proto.prompt_token_ids().end());
  out.response_token_ids.assign(proto.response_token_ids().begin(),
                                proto.response_token_ids().end());
  return out;
}

absl::StatusOr<LogProbsRequest> FromProto(const v1::ComputeLogProbsRequest& proto) {
  if (proto.prompt_token_ids().empty()) return InvalidField("prompt_token_ids", "is empty");
  if (proto.response_token_ids().empty()) return InvalidField("response_token_ids", "is empty");
  LogProbsRequest out;
  if (proto.has_temperature()) out.temperature = proto.temperature();
  TANDEM_RETURN_IF_ERROR(CheckAbove("temperature", out.temperature, 0));
  out.prompt_token_ids.assign(proto.prompt_token_ids().begin(), proto.prompt_token_ids().end());
  out.response_token_ids.assign(proto.response_token_ids().begin(),
                                proto.response_token_ids().end());
  return out;
}

v1::ComputeLogProbsResponse ToProto(const LogProbsResult& result) {
  v1::ComputeLogProbsResponse proto;
  rpc::FloatsToProto(result.logprobs, proto.mutable_logprobs());
  rpc::FloatsToProto(result.entropies, proto.mutable_entropies());
  rpc::WeightsVersionToProto(result.weights, proto.mutable_weights());
  return proto;
}

v1::StepReport ToProto(const StepReport& report) {
  v1::StepReport proto;
  proto.set_run_id(report.run_id);
  proto.set_step(report.step);
  rpc::WeightsVersionToProto(report.weights, proto.mutable_weights());
  proto.set_skipped(report.skipped);
  proto.set_skip_reason(report.skip_reason);
  proto.mutable_metrics()->insert(report.metrics.begin(), report.metrics.end());
  return proto;
}

}  // namespace tandem::trainer
