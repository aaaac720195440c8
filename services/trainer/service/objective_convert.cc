#include "services/trainer/service/objective_convert.h"

#include <google/protobuf/util/json_util.h>

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/config/config.h"

namespace tandem::trainer {
namespace {

// The values of an enum, in the engine and in the contract; the first is the default.
template <typename Proto, typename Plain>
struct Choice {
  Proto proto;
  Plain plain;
};

constexpr Choice<v1::PolicyLossKind, loss::PolicyLossKind> kLossKinds[] = {
    {v1::POLICY_LOSS_KIND_PPO_CLIP, loss::PolicyLossKind::kPpoClip},
    {v1::POLICY_LOSS_KIND_GSPO, loss::PolicyLossKind::kGspo},
    {v1::POLICY_LOSS_KIND_CISPO, loss::PolicyLossKind::kCispo}};

constexpr Choice<v1::KlEstimator, loss::KlEstimator> kKlEstimators[] = {
    {v1::KL_ESTIMATOR_K3, loss::KlEstimator::kK3},
    {v1::KL_ESTIMATOR_K1, loss::KlEstimator::kK1},
    {v1::KL_ESTIMATOR_K2, loss::KlEstimator::kK2},
    {v1::KL_ESTIMATOR_K1_GRADIENT_K2, loss::KlEstimator::kK1GradientK2},
    {v1::KL_ESTIMATOR_K3_GRADIENT_K2, loss::KlEstimator::kK3GradientK2}};

constexpr Choice<v1::ImportanceSamplingLevel, loss::ImportanceSamplingLevel>
    kImportanceSamplingLevels[] = {
        {v1::IMPORTANCE_SAMPLING_LEVEL_TOKEN, loss::ImportanceSamplingLevel::kToken},
        {v1::IMPORTANCE_SAMPLING_LEVEL_SEQUENCE, loss::ImportanceSamplingLevel::kSequence}};

constexpr Choice<v1::ImportanceSamplingMode, loss::ImportanceSamplingMode>
    kImportanceSamplingModes[] = {
        {v1::IMPORTANCE_SAMPLING_MODE_TRUNCATE, loss::ImportanceSamplingMode::kTruncate},
        {v1::IMPORTANCE_SAMPLING_MODE_MASK, loss::ImportanceSamplingMode::kMask}};

constexpr Choice<v1::OldLogprobs, OldLogprobs> kOldLogprobs[] = {
    {v1::OLD_LOGPROBS_SENIOR, OldLogprobs::kSenior},
    {v1::OLD_LOGPROBS_AUTHOR, OldLogprobs::kAuthor},
    {v1::OLD_LOGPROBS_RECOMPUTED, OldLogprobs::kRecomputed},
    {v1::OLD_LOGPROBS_PROVIDED, OldLogprobs::kProvided}};

constexpr Choice<v1::AdvantageEstimator, AdvantageEstimator> kAdvantageEstimators[] = {
    {v1::ADVANTAGE_ESTIMATOR_GROUP_RELATIVE, AdvantageEstimator::kGroupRelative},
    {v1::ADVANTAGE_ESTIMATOR_GROUP_RELATIVE_BATCH_STD, AdvantageEstimator::kGroupRelativeBatchStd},
    {v1::ADVANTAGE_ESTIMATOR_GROUP_RELATIVE_NO_STD, AdvantageEstimator::kGroupRelativeNoStd},
    {v1::ADVANTAGE_ESTIMATOR_LEAVE_ONE_OUT, AdvantageEstimator::kLeaveOneOut},
    {v1::ADVANTAGE_ESTIMATOR_REINFORCE_PLUS_PLUS, AdvantageEstimator::kReinforcePlusPlus},
    {v1::ADVANTAGE_ESTIMATOR_GAE, AdvantageEstimator::kGae},
    {v1::ADVANTAGE_ESTIMATOR_PROVIDED, AdvantageEstimator::kProvided}};

constexpr Choice<v1::KlPlacement, KlPlacement> kKlPlacements[] = {
    {v1::KL_PLACEMENT_LOSS, KlPlacement::kLoss}, {v1::KL_PLACEMENT_REWARD, KlPlacement::kReward}};

constexpr Choice<v1::ReferenceLogprobs, ReferenceLogprobs> kReferenceLogprobs[] = {
    {v1::REFERENCE_LOGPROBS_MODEL, ReferenceLogprobs::kModel},
    {v1::REFERENCE_LOGPROBS_PROVIDED, ReferenceLogprobs::kProvided}};

constexpr Choice<v1::JuniorKlKind, TeacherDirection> kJuniorKlKinds[] = {
    {v1::JUNIOR_KL_KIND_REVERSE, TeacherDirection::kReverse},
    {v1::JUNIOR_KL_KIND_FORWARD, TeacherDirection::kForward},
    {v1::JUNIOR_KL_KIND_FORWARD_SAMPLED, TeacherDirection::kForwardSampled}};

constexpr Choice<v1::DivergenceKind, loss::DivergenceKind> kDivergenceKinds[] = {
    {v1::DIVERGENCE_KIND_REVERSE, loss::DivergenceKind::kReverse},
    {v1::DIVERGENCE_KIND_FORWARD, loss::DivergenceKind::kForward},
    {v1::DIVERGENCE_KIND_JENSEN_SHANNON, loss::DivergenceKind::kJensenShannon}};

constexpr Choice<v1::RejectionLevel, loss::RejectionLevel> kRejectionLevels[] = {
    {v1::REJECTION_LEVEL_TOKEN, loss::RejectionLevel::kToken},
    {v1::REJECTION_LEVEL_SEQUENCE_SUM, loss::RejectionLevel::kSequenceSum},
    {v1::REJECTION_LEVEL_SEQUENCE_MEAN, loss::RejectionLevel::kSequenceMean},
    {v1::REJECTION_LEVEL_SEQUENCE_MAX, loss::RejectionLevel::kSequenceMax}};

constexpr Choice<v1::StaleSamples, StaleSamples> kStaleSamples[] = {
    {v1::STALE_SAMPLES_REFUSE, StaleSamples::kRefuse},
    {v1::STALE_SAMPLES_DROP, StaleSamples::kDrop}};

constexpr Choice<v1::Aggregation, loss::Aggregation> kAggregations[] = {
    {v1::AGGREGATION_TOKEN_MEAN, loss::Aggregation::kTokenMean},
    {v1::AGGREGATION_TOKEN_SUM, loss::Aggregation::kTokenSum},
    {v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM, loss::Aggregation::kSeqMeanTokenSum},
    {v1::AGGREGATION_SEQ_MEAN_TOKEN_MEAN, loss::Aggregation::kSeqMeanTokenMean},
    {v1::AGGREGATION_SEQ_MEAN_TOKEN_SUM_NORM, loss::Aggregation::kSeqMeanTokenSumNorm}};

constexpr Choice<v1::Normalizer, loss::Normalizer> kNormalizers[] = {
    {v1::NORMALIZER_NONZERO_WEIGHT, loss::Normalizer::kNonzeroWeight},
    {v1::NORMALIZER_ALL_TOKENS, loss::Normalizer::kAllTokens},
    {v1::NORMALIZER_SUM_OF_WEIGHTS, loss::Normalizer::kSumOfWeights}};

// Sets `out` to the choice that `proto` names; 0, which is UNSPECIFIED in every enum, names the
// default.
template <typename Proto, typename Plain, size_t N>
absl::Status Choose(absl::string_view path, Proto proto, const Choice<Proto, Plain> (&choices)[N],
                    Plain* out) {
  *out = choices[0].plain;
  if (proto == Proto{}) return absl::OkStatus();
  for (const auto& choice : choices) {
    if (choice.proto != proto) continue;
    *out = choice.plain;
    return absl::OkStatus();
  }
  return InvalidField(path, absl::StrCat("unknown value ", static_cast<int>(proto)));
}

// Returns the contract's value of a choice; that of the default for the KL estimator "none", which
// the contract expresses as coefficient 0.
template <typename Proto, typename Plain, size_t N>
Proto NameOf(Plain plain, const Choice<Proto, Plain> (&choices)[N]) {
  for (const auto& choice : choices) {
    if (choice.plain == plain) return choice.proto;
  }
  return choices[0].proto;
}

// Converts the clip, KL, entropy and importance terms.
absl::Status LossTermsFromProto(const v1::PolicyObjective& proto, loss::PolicyLossOptions* out) {
  TANDEM_RETURN_IF_ERROR(Choose("loss_kind", proto.loss_kind(), kLossKinds, &out->kind));
  if (proto.has_clip_ratio_low()) out->clip_ratio_low = proto.clip_ratio_low();
  if (proto.has_clip_ratio_high()) out->clip_ratio_high = proto.clip_ratio_high();
  out->dual_clip = proto.dual_clip();
  out->kl_coefficient = proto.kl_coefficient();
  TANDEM_RETURN_IF_ERROR(
      Choose("kl_estimator", proto.kl_estimator(), kKlEstimators, &out->kl_estimator));
  out->k3_cap = proto.k3_cap();
  out->kl_importance_correction = proto.kl_importance_correction();
  out->entropy_coefficient = proto.entropy_coefficient();
  out->importance_sampling_cap = proto.importance_sampling_cap();
  out->importance_sampling_floor = proto.importance_sampling_floor();
  out->off_policy_mask_threshold = proto.off_policy_mask_threshold();
  TANDEM_RETURN_IF_ERROR(Choose("importance_sampling_level", proto.importance_sampling_level(),
                                kImportanceSamplingLevels, &out->importance_sampling_level));
  return Choose("importance_sampling_mode", proto.importance_sampling_mode(),
                kImportanceSamplingModes, &out->importance_sampling_mode);
}

absl::Status RejectionFromProto(const v1::PolicyObjective& proto, loss::RejectionOptions* out) {
  out->upper = proto.rejection_upper();
  out->lower = proto.rejection_lower();
  TANDEM_RETURN_IF_ERROR(
      Choose("rejection_level", proto.rejection_level(), kRejectionLevels, &out->level));
  // The default is K1; that of kl_estimator differs.
  if (proto.rejection_estimator() == v1::KL_ESTIMATOR_UNSPECIFIED) return absl::OkStatus();
  return Choose("rejection_estimator", proto.rejection_estimator(), kKlEstimators, &out->estimator);
}

absl::Status ScaleFromProto(const v1::PolicyObjective& proto, loss::LossScaleOptions* out) {
  TANDEM_RETURN_IF_ERROR(
      Choose("aggregation", proto.aggregation(), kAggregations, &out->aggregation));
  TANDEM_RETURN_IF_ERROR(Choose("normalizer", proto.normalizer(), kNormalizers, &out->normalizer));
  out->norm_constant = proto.norm_constant();
  return absl::OkStatus();
}

absl::Status DistillationFromProto(const v1::Distillation& proto, DistillationOptions* out) {
  out->coefficient = proto.coefficient();
  TANDEM_RETURN_IF_ERROR(Choose("kind", proto.kind(), kDivergenceKinds, &out->divergence.kind));
  if (proto.has_beta()) {
    if (out->divergence.kind != loss::DivergenceKind::kJensenShannon) {
      return InvalidField("beta", "is given, but only JENSEN_SHANNON has a mixture");
    }
    out->divergence.beta = proto.beta();
  }
  out->top_k = proto.top_k();
  out->temperature = proto.temperature();
  return absl::OkStatus();
}

v1::Distillation ToProto(const DistillationOptions& distillation) {
  v1::Distillation proto;
  proto.set_coefficient(distillation.coefficient);
  proto.set_kind(NameOf(distillation.divergence.kind, kDivergenceKinds));
  if (distillation.divergence.kind == loss::DivergenceKind::kJensenShannon) {
    proto.set_beta(distillation.divergence.beta);
  }
  proto.set_top_k(static_cast<int32_t>(distillation.top_k));
  proto.set_temperature(distillation.temperature);
  return proto;
}

}  // namespace

absl::StatusOr<PolicyObjective> FromProto(const v1::PolicyObjective& proto) {
  PolicyObjective out;
  TANDEM_RETURN_IF_ERROR(LossTermsFromProto(proto, &out.loss));
  TANDEM_RETURN_IF_ERROR(ScaleFromProto(proto, &out.scale));
  TANDEM_RETURN_IF_ERROR(RejectionFromProto(proto, &out.rejection));
  out.importance_sampling_batch_normalize = proto.importance_sampling_batch_normalize();
  out.junior_token_loss_weight = proto.junior_token_loss_weight();
  out.mask_truncated_completions = proto.mask_truncated_completions();
  TANDEM_RETURN_IF_ERROR(
      Choose("old_logprobs", proto.old_logprobs(), kOldLogprobs, &out.old_logprobs));
  TANDEM_RETURN_IF_ERROR(Choose("advantage_estimator", proto.advantage_estimator(),
                                kAdvantageEstimators, &out.advantage_estimator));
  if (proto.has_std_epsilon()) out.std_epsilon = proto.std_epsilon();
  TANDEM_RETURN_IF_ERROR(
      Choose("kl_placement", proto.kl_placement(), kKlPlacements, &out.kl_placement));
  TANDEM_RETURN_IF_ERROR(Choose("reference_logprobs", proto.reference_logprobs(),
                                kReferenceLogprobs, &out.reference_logprobs));
  out.junior_kl_coefficient = proto.junior_kl_coefficient();
  TANDEM_RETURN_IF_ERROR(
      Choose("junior_kl_kind", proto.junior_kl_kind(), kJuniorKlKinds, &out.junior_kl_kind));
  if (proto.has_gae_gamma()) out.gae_gamma = proto.gae_gamma();
  if (proto.has_gae_lambda()) out.gae_lambda = proto.gae_lambda();
  out.bootstrap_truncated = proto.bootstrap_truncated();
  out.gae_skip_junior_tokens = proto.gae_skip_junior_tokens();
  out.whiten_advantages = proto.whiten_advantages();
  out.max_staleness = proto.max_staleness();
  TANDEM_RETURN_IF_ERROR(
      Choose("stale_samples", proto.stale_samples(), kStaleSamples, &out.stale_samples));
  if (proto.has_num_mini_batches()) out.updates.num_mini_batches = proto.num_mini_batches();
  if (proto.has_num_epochs()) out.updates.num_epochs = proto.num_epochs();
  if (proto.has_value_clip()) out.value_clip = proto.value_clip();
  out.routing_replay = proto.routing_replay();
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(
      "distillation", DistillationFromProto(proto.distillation(), &out.distillation)));
  return out;
}

absl::StatusOr<SupervisedObjective> FromProto(const v1::SupervisedObjective& proto) {
  SupervisedObjective out;
  TANDEM_RETURN_IF_ERROR(
      Choose("aggregation", proto.aggregation(), kAggregations, &out.aggregation));
  if (out.aggregation == loss::Aggregation::kSeqMeanTokenSumNorm) {
    return InvalidField("aggregation", "SEQ_MEAN_TOKEN_SUM_NORM needs a policy objective");
  }
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(
      "distillation", DistillationFromProto(proto.distillation(), &out.distillation)));
  if (proto.has_cross_entropy_coefficient()) {
    out.cross_entropy_coefficient = proto.cross_entropy_coefficient();
  }
  return out;
}

v1::PolicyObjective ToProto(const PolicyObjective& objective) {
  v1::PolicyObjective proto;
  proto.set_loss_kind(NameOf(objective.loss.kind, kLossKinds));
  proto.set_junior_token_loss_weight(objective.junior_token_loss_weight);
  proto.set_mask_truncated_completions(objective.mask_truncated_completions);
  proto.set_clip_ratio_low(objective.loss.clip_ratio_low);
  proto.set_clip_ratio_high(objective.loss.clip_ratio_high);
  proto.set_dual_clip(objective.loss.dual_clip);
  proto.set_old_logprobs(NameOf(objective.old_logprobs, kOldLogprobs));
  proto.set_advantage_estimator(NameOf(objective.advantage_estimator, kAdvantageEstimators));
  proto.set_std_epsilon(objective.std_epsilon);
  proto.set_aggregation(NameOf(objective.scale.aggregation, kAggregations));
  proto.set_normalizer(NameOf(objective.scale.normalizer, kNormalizers));
  proto.set_norm_constant(objective.scale.norm_constant);
  proto.set_kl_coefficient(objective.loss.kl_coefficient);
  proto.set_kl_estimator(NameOf(objective.loss.kl_estimator, kKlEstimators));
  proto.set_k3_cap(objective.loss.k3_cap);
  proto.set_kl_importance_correction(objective.loss.kl_importance_correction);
  proto.set_entropy_coefficient(objective.loss.entropy_coefficient);
  proto.set_importance_sampling_cap(objective.loss.importance_sampling_cap);
  proto.set_importance_sampling_floor(objective.loss.importance_sampling_floor);
  proto.set_off_policy_mask_threshold(objective.loss.off_policy_mask_threshold);
  proto.set_importance_sampling_level(
      NameOf(objective.loss.importance_sampling_level, kImportanceSamplingLevels));
  proto.set_importance_sampling_mode(
      NameOf(objective.loss.importance_sampling_mode, kImportanceSamplingModes));
  proto.set_kl_placement(NameOf(objective.kl_placement, kKlPlacements));
  proto.set_reference_logprobs(NameOf(objective.reference_logprobs, kReferenceLogprobs));
  proto.set_junior_kl_coefficient(objective.junior_kl_coefficient);
  proto.set_junior_kl_kind(NameOf(objective.junior_kl_kind, kJuniorKlKinds));
  proto.set_gae_gamma(objective.gae_gamma);
  proto.set_gae_lambda(objective.gae_lambda);
  proto.set_bootstrap_truncated(objective.bootstrap_truncated);
  proto.set_gae_skip_junior_tokens(objective.gae_skip_junior_tokens);
  proto.set_whiten_advantages(objective.whiten_advantages);
  proto.set_max_staleness(static_cast<int32_t>(objective.max_staleness));
  proto.set_stale_samples(NameOf(objective.stale_samples, kStaleSamples));
  proto.set_num_mini_batches(static_cast<int32_t>(objective.updates.num_mini_batches));
  proto.set_num_epochs(static_cast<int32_t>(objective.updates.num_epochs));
  proto.set_value_clip(objective.value_clip);
  proto.set_importance_sampling_batch_normalize(objective.importance_sampling_batch_normalize);
  proto.set_rejection_upper(objective.rejection.upper);
  proto.set_rejection_lower(objective.rejection.lower);
  proto.set_rejection_level(NameOf(objective.rejection.level, kRejectionLevels));
  proto.set_rejection_estimator(NameOf(objective.rejection.estimator, kKlEstimators));
  proto.set_routing_replay(objective.routing_replay);
  *proto.mutable_distillation() = ToProto(objective.distillation);
  return proto;
}

absl::StatusOr<PolicyObjective> ResolveObjective(const v1::PolicyObjective& proto,
                                                 const ObjectiveSupport& support) {
  absl::StatusOr<PolicyObjective> objective = FromProto(proto);
  if (!objective.ok()) return PrependFieldPath("policy", objective.status());
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("policy", CheckObjective(*objective, support)));
  return objective;
}

ObjectiveSupport SupportOf(const config::v1::TrainerServerConfig& config) {
  return {.critic = !config.critic_address().empty(),
          // Without its adapters the model is one.
          .reference = !config.reference_model().empty() || config.has_lora(),
          .junior = !config.junior_model().empty(),
          .teacher = !config.teacher_model().empty(),
          .frozen = config.speculator().freeze_base_model()};
}

absl::StatusOr<std::string> ResolveObjectiveText(const std::string& text,
                                                 const ObjectiveSupport& support) {
  v1::PolicyObjective proto;
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("policy", config::MergeYaml(text, &proto)));
  TANDEM_ASSIGN_OR_RETURN(const PolicyObjective objective, ResolveObjective(proto, support));
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  if (!google::protobuf::util::MessageToJsonString(ToProto(objective), &json, options).ok()) {
    return absl::InternalError("the objective cannot be printed as JSON");
  }
  return json;
}

}  // namespace tandem::trainer
