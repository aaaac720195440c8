#include "services/trainer/engine/steps/batch_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/tandem_config.h"
#include "common/steps/training_state.h"

namespace tandem::trainer {
namespace {

// Squares of rewards, and of advantages made from them, summed over a batch, are finite in float32.
constexpr double kMaxReward = 1e9;

absl::Status Refused(absl::string_view path, absl::string_view message, const ErrorReason& reason) {
  return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, path, message), reason);
}

bool IsTooOld(int64_t version, int64_t max_staleness, const BatchLimits& limits) {
  return limits.version - version > max_staleness || limits.lineage->DigestOf(version).empty();
}

bool IsStale(const Trajectory& trajectory, int64_t max_staleness, const BatchLimits& limits) {
  return std::any_of(
      trajectory.senior_versions.begin(), trajectory.senior_versions.end(),
      [&](const VersionRun& run) { return IsTooOld(run.weights.version, max_staleness, limits); });
}

// Checks the weights that wrote a run of tokens.
absl::Status CheckWeights(const WeightsVersion& weights, const PolicyObjective& objective,
                          const BatchLimits& limits) {
  const int64_t behind = limits.version - weights.version;
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("version", weights.version, 0));
  if (weights.digest.empty()) return InvalidField("digest", "is missing");
  if (behind < 0) {
    return Refused("version",
                   absl::StrCat("version ", weights.version, " is unknown; the trainer is at ",
                                limits.version),
                   reason::kUnknownPolicyVersion);
  }
  const int64_t max_staleness = objective.max_staleness;
  if (IsTooOld(weights.version, max_staleness, limits)) {
    if (objective.stale_samples == StaleSamples::kDrop) return absl::OkStatus();
    return Refused(
        "version",
        absl::StrCat("version ", weights.version, " is ", behind, " behind the trainer's, ",
                     behind > max_staleness
                         ? absl::StrCat("at most ", max_staleness, " are allowed (max_staleness)")
                         : "and the trainer no longer knows its digest"),
        reason::kTrajectoryTooOld);
  }
  const std::string known = limits.lineage->DigestOf(weights.version);
  if (weights.digest != known) {
    return Refused("digest",
                   absl::StrCat("version ", weights.version, " of this trainer has the digest ",
                                known, ", not ", weights.digest),
                   reason::kWeightsDiffer);
  }
  return absl::OkStatus();
}

absl::Status CheckVersions(const std::vector<VersionRun>& runs, int64_t length,
                           const PolicyObjective& objective, const BatchLimits& limits) {
  if (runs.empty()) return InvalidField("senior_versions", "is missing");
  int64_t total = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string path = absl::StrCat("senior_versions[", i, "]");
    if (runs[i].count < 1 || runs[i].count > length - total) {
      return InvalidField(absl::StrCat(path, ".count"),
                          absl::StrCat("the runs must be positive and add up to ", length));
    }
    total += runs[i].count;
    TANDEM_RETURN_IF_ERROR(PrependFieldPath(absl::StrCat(path, ".weights"),
                                            CheckWeights(runs[i].weights, objective, limits)));
  }
  if (total != length) {
    return InvalidField("senior_versions",
                        absl::StrCat("cover ", total, " of ", length, " response tokens"));
  }
  return absl::OkStatus();
}

absl::Status CheckMask(const Trajectory& trajectory) {
  const size_t length = trajectory.response_token_ids.size();
  const std::vector<Author>& mask = trajectory.authorship_mask;
  if (mask.size() != length) {
    return InvalidField("authorship_mask", absl::StrCat("has ", mask.size(), " entries for ",
                                                        length, " response tokens"));
  }
  for (size_t i = 0; i < length; ++i) {
    if (AuthorOf(static_cast<uint8_t>(mask[i])).has_value()) continue;
    return InvalidField(absl::StrCat("authorship_mask[", i, "]"),
                        "must be 1 (senior), 0 (junior) or 2 (environment)");
  }
  for (const size_t i : {size_t{0}, length - 1}) {
    if (IsDrawn(mask[i])) continue;
    return InvalidField(absl::StrCat("authorship_mask[", i, "]"),
                        "is of an environment, but a model writes the first token of a response "
                        "and its last");
  }
  const bool junior = std::ranges::count(mask, Author::kJunior) > 0;
  if (junior && !trajectory.tandem.enabled) {
    return InvalidField("authorship_mask", "names the junior although tandem was off");
  }
  if (junior && trajectory.junior_version.empty()) {
    return InvalidField("junior_version", "is missing although the junior wrote");
  }
  return absl::OkStatus();
}

// Checks the experts that the tokens of a trajectory take.
absl::Status CheckRoutedExperts(const Trajectory& trajectory, const RoutingCache& routing) {
  const TokenExperts& experts = trajectory.routed_experts;
  if (experts.empty()) {
    return InvalidField("routed_experts", "is missing, but routing_replay needs it");
  }
  if (experts.layers != routing.layers || experts.experts_per_token != routing.experts_per_token) {
    return InvalidField("routed_experts",
                        absl::StrCat("holds ", experts.experts_per_token, " experts in ",
                                     experts.layers, " layers per token, but the model takes ",
                                     routing.experts_per_token, " in ", routing.layers));
  }
  const size_t tokens =
      trajectory.prompt_token_ids.size() + trajectory.response_token_ids.size() - 1;
  if (experts.ids.size() != tokens * static_cast<size_t>(experts.ids_per_token())) {
    return InvalidField("routed_experts",
                        absl::StrCat("must have a row for each of ", tokens, " tokens"));
  }
  const auto per_token = static_cast<size_t>(experts.experts_per_token);
  for (size_t i = 0; i < experts.ids.size(); ++i) {
    const bool ascends = i % per_token == 0 || experts.ids[i] > experts.ids[i - 1];
    if (experts.ids[i] < routing.num_experts && ascends) continue;
    return InvalidField(absl::StrCat("routed_experts[", i / per_token / routing.layers, "]"),
                        absl::StrCat("must hold different experts in ascending order, below ",
                                     routing.num_experts));
  }
  return absl::OkStatus();
}

absl::Status CheckTrajectory(const Trajectory& trajectory, const PolicyObjective& objective,
                             const BatchLimits& limits) {
  TANDEM_RETURN_IF_ERROR(training::CheckSequence(trajectory.prompt_token_ids,
                                                 trajectory.response_token_ids, limits.sequence));
  if (trajectory.response_offset != 0) {
    return InvalidField("response_offset",
                        absl::StrCat("is ", trajectory.response_offset,
                                     ": a step takes whole responses, with all of their turns"));
  }
  TANDEM_RETURN_IF_ERROR(CheckMask(trajectory));
  const size_t length = trajectory.response_token_ids.size();
  TANDEM_RETURN_IF_ERROR(
      training::CheckLogProbs("author_logprobs", trajectory.author_logprobs, length));
  if (!trajectory.other_logprobs.empty()) {
    TANDEM_RETURN_IF_ERROR(
        training::CheckLogProbs("other_logprobs", trajectory.other_logprobs, length));
  }
  if (!trajectory.log_keep_mass.empty()) {
    TANDEM_RETURN_IF_ERROR(
        training::CheckLogProbs("log_keep_mass", trajectory.log_keep_mass, length));
  }
  TANDEM_RETURN_IF_ERROR(
      CheckVersions(trajectory.senior_versions, static_cast<int64_t>(length), objective, limits));
  if (trajectory.finish_reason == FinishReason::kUnspecified) {
    return InvalidField("finish_reason", "is missing");
  }
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("sampling", Validate(trajectory.sampling, limits.sequence.num_token_ids)));
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("tandem", Validate(trajectory.tandem, limits.sequence.num_token_ids)));
  if (objective.routing_replay) {
    TANDEM_RETURN_IF_ERROR(CheckRoutedExperts(trajectory, limits.routing));
  }
  const bool junior_counts = objective.junior_token_loss_weight > 0 &&
                             std::ranges::count(trajectory.authorship_mask, Author::kJunior) > 0;
  if (junior_counts && objective.old_logprobs == OldLogprobs::kSenior &&
      trajectory.other_logprobs.empty()) {
    return InvalidField("other_logprobs",
                        "is missing: junior tokens have weight, and old_logprobs SENIOR needs the "
                        "senior's log-probability of them");
  }
  return absl::OkStatus();
}

// Checks a per-token field that belongs to one choice of the objective.
absl::Status CheckChoice(const char* field, const std::vector<float>& numbers, size_t length,
                         bool chosen) {
  if (chosen) return training::CheckPerToken(field, numbers, length);
  if (numbers.empty()) return absl::OkStatus();
  return InvalidField(field, "is given, but the objective does not use it");
}

// Checks the likeliest tokens of a teacher at `length` places.
absl::Status CheckTopTokens(const TopTokens& tokens, int64_t top_k, size_t length,
                            int64_t num_token_ids) {
  if (tokens.count != top_k || tokens.ids.size() != length * static_cast<size_t>(top_k)) {
    return InvalidField("top_token_ids",
                        absl::StrCat("must hold distillation.top_k = ", top_k,
                                     " tokens for each of the ", length, " response tokens"));
  }
  // Rounded log-probabilities may sum to a little more than 1.
  constexpr double kMostMass = 1.001;
  std::vector<int32_t> row;
  for (size_t t = 0; t < length; ++t) {
    const auto first = static_cast<int64_t>(t) * top_k;
    row.assign(tokens.ids.begin() + first, tokens.ids.begin() + first + top_k);
    std::ranges::sort(row);
    if (row.front() < 0 || row.back() >= num_token_ids ||
        std::ranges::adjacent_find(row) != row.end()) {
      return InvalidField(absl::StrCat("top_token_ids[", t, "]"),
                          absl::StrCat("must hold different token ids below ", num_token_ids));
    }
    double mass = 0;
    for (int64_t i = first; i < first + top_k; ++i) {
      mass += std::exp(static_cast<double>(tokens.logprobs[static_cast<size_t>(i)]));
    }
    if (!(mass <= kMostMass)) {
      return InvalidField(
          absl::StrCat("top_logprobs[", t, "]"),
          "must hold log-probabilities of different tokens, whose sum is at most 1");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTeacher(const TeacherTokens& teacher, const DistillationOptions& distillation,
                          size_t length, int64_t num_token_ids) {
  if (!distillation.is_on()) {
    if (teacher == TeacherTokens{}) return absl::OkStatus();
    return InvalidField("teacher", "is given, but the objective does not use it");
  }
  TANDEM_RETURN_IF_ERROR(training::CheckIdLength("teacher.name", teacher.name));
  if (distillation.reads_model()) {
    if (teacher.top_tokens == TopTokens{}) return absl::OkStatus();
    return InvalidField("teacher.top_token_ids",
                        "is given, but with distillation.top_k 0 the trainer's model is the "
                        "teacher");
  }
  return PrependFieldPath(
      "teacher", CheckTopTokens(teacher.top_tokens, distillation.top_k, length, num_token_ids));
}

absl::Status CheckTopK(const DistillationOptions& distillation, const BatchLimits& limits) {
  if (distillation.top_k < limits.sequence.num_token_ids) return absl::OkStatus();
  return InvalidField("distillation.top_k", absl::StrCat("must be below the vocabulary of ",
                                                         limits.sequence.num_token_ids));
}

absl::Status CheckSample(const PolicySample& sample, const PolicyObjective& objective,
                         const BatchLimits& limits) {
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("trajectory", CheckTrajectory(sample.trajectory, objective, limits)));
  const size_t length = sample.trajectory.response_token_ids.size();
  const bool provided = objective.advantage_estimator == AdvantageEstimator::kProvided;
  TANDEM_RETURN_IF_ERROR(CheckChoice("advantages", sample.advantages, length, provided));
  TANDEM_RETURN_IF_ERROR(CheckChoice("old_logprobs", sample.old_logprobs, length,
                                     objective.old_logprobs == OldLogprobs::kProvided));
  TANDEM_RETURN_IF_ERROR(CheckChoice("reference_logprobs", sample.reference_logprobs, length,
                                     objective.reference_logprobs == ReferenceLogprobs::kProvided));
  TANDEM_RETURN_IF_ERROR(
      CheckTeacher(sample.teacher, objective.distillation, length, limits.sequence.num_token_ids));
  if (!sample.reward.has_value()) {
    if (!provided) return InvalidField("reward", "is missing");
  } else {
    TANDEM_RETURN_IF_ERROR(CheckInRange("reward", *sample.reward, -kMaxReward, kMaxReward));
  }
  TANDEM_RETURN_IF_ERROR(training::CheckIdLength("group_id", sample.group_id));
  if (IsGrouped(objective.advantage_estimator) && sample.group_id.empty()) {
    return InvalidField("group_id", "is missing");
  }
  return absl::OkStatus();
}

// Whether old log-probability and behaviour of every token with a weight are one recorded number,
// whatever the trainer's model says. Looks at how the samples were drawn, which does not change
// within a run, rather than at who wrote which token.
bool OldIsBehaviour(const PolicyBatch& batch) {
  const PolicyObjective& objective = batch.objective;
  const bool author = objective.old_logprobs == OldLogprobs::kAuthor;
  if (!author && objective.old_logprobs != OldLogprobs::kSenior) return false;
  const bool counts_juniors = objective.junior_token_loss_weight > 0;
  return std::none_of(batch.samples.begin(), batch.samples.end(), [&](const PolicySample& sample) {
    const Trajectory& trajectory = sample.trajectory;
    return !trajectory.log_keep_mass.empty() ||
           (!author && counts_juniors && trajectory.tandem.enabled);
  });
}

// Whether a token stays whose old log-probability is its behaviour.
bool KeepsEqual(const loss::RejectionOptions& options) {
  return options.estimator != loss::KlEstimator::kK1 || (options.lower <= 1 && options.upper >= 1);
}

// Refuses bounds of importance weights and of rejection that change nothing because each compares a
// number with itself.
absl::Status CheckRolloutCorrection(const PolicyBatch& batch) {
  const PolicyObjective& objective = batch.objective;
  const bool weights_are_one =
      objective.loss.importance_sampling_cap >= 1 && objective.loss.importance_sampling_floor <= 1;
  const bool rejects_none = RejectsTokens(objective) && KeepsEqual(objective.rejection);
  if (!(weights_are_one || rejects_none) || !OldIsBehaviour(batch)) return absl::OkStatus();
  return InvalidField(
      weights_are_one ? "policy.importance_sampling_cap" : "policy.rejection_upper",
      absl::StrCat("has no effect with old_logprobs ",
                   objective.old_logprobs == OldLogprobs::kAuthor ? "AUTHOR" : "SENIOR",
                   ": it compares every recorded log-probability with itself; old_logprobs "
                   "RECOMPUTED compares it with the trainer's"));
}

absl::Status CheckCount(size_t count, const BatchLimits& limits) {
  if (count == 0) return InvalidField("samples", "must hold at least one sample");
  if (static_cast<int64_t>(count) > limits.max_samples) {
    return FieldError(
        absl::StatusCode::kOutOfRange, "samples",
        absl::StrCat("has ", count, " samples, at most ", limits.max_samples, " are allowed"));
  }
  return absl::OkStatus();
}

}  // namespace

PolicyBatch WithoutStale(const PolicyBatch& batch, const BatchLimits& limits) {
  PolicyBatch kept{.objective = batch.objective, .samples = {}};
  std::copy_if(batch.samples.begin(), batch.samples.end(), std::back_inserter(kept.samples),
               [&](const PolicySample& sample) {
                 return !IsStale(sample.trajectory, batch.objective.max_staleness, limits);
               });
  return kept;
}

absl::Status CheckPolicyBatch(const PolicyBatch& batch, const BatchLimits& limits) {
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("policy", CheckObjective(batch.objective, limits.support)));
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("policy", CheckTopK(batch.objective.distillation, limits)));
  if (batch.objective.routing_replay && limits.routing.layers == 0) {
    return InvalidField("policy.routing_replay",
                        "needs a mixture of experts, but no layer of the model has experts");
  }
  TANDEM_RETURN_IF_ERROR(CheckCount(batch.samples.size(), limits));
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(PrependFieldPath(
        absl::StrCat("samples[", i, "]"), CheckSample(batch.samples[i], batch.objective, limits)));
  }
  return CheckRolloutCorrection(batch);
}

absl::Status CheckSupervisedBatch(const SupervisedBatch& batch, const BatchLimits& limits) {
  const DistillationOptions& distillation = batch.objective.distillation;
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("supervised", CheckSupervisedObjective(batch.objective, limits.support)));
  TANDEM_RETURN_IF_ERROR(PrependFieldPath("supervised", CheckTopK(distillation, limits)));
  TANDEM_RETURN_IF_ERROR(CheckCount(batch.samples.size(), limits));
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const SupervisedSample& sample = batch.samples[i];
    if (!sample.weights.empty() && batch.objective.aggregation != loss::Aggregation::kTokenSum) {
      return InvalidField(absl::StrCat("samples[", i, "].weights"),
                          "need the aggregation TOKEN_SUM: a mean of weights of any sign means "
                          "nothing");
    }
    if (!sample.weights.empty() && distillation.is_on()) {
      return InvalidField(absl::StrCat("samples[", i, "].weights"),
                          "may be of any sign: they do not go with distillation");
    }
    TANDEM_RETURN_IF_ERROR(
        PrependFieldPath(absl::StrCat("samples[", i, "]"),
                         training::CheckSequence(sample.prompt_token_ids, sample.response_token_ids,
                                                 limits.sequence)));
    TANDEM_RETURN_IF_ERROR(PrependFieldPath(
        absl::StrCat("samples[", i, "]"),
        CheckTeacher(sample.teacher, distillation, sample.response_token_ids.size(),
                     limits.sequence.num_token_ids)));
  }
  return absl::OkStatus();
}

}  // namespace tandem::trainer
