#include "services/trainer/engine/steps/batch_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "common/base/errors/error.h"
#include "services/trainer/engine/testing/batches.h"

namespace tandem::trainer {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

BatchLimits Limits() {
  static const training::WeightsLineage lineage = [] {
    training::WeightsLineage known;
    known.Record({0, kTestDigest});
    return known;
  }();
  return {.sequence = {.num_token_ids = 61, .max_model_len = 32},
          .max_samples = 8,
          .lineage = &lineage,
          .routing = {.layers = 3, .num_experts = 5, .experts_per_token = 2}};
}

// The experts of sample 2, of a batch that replays them.
TokenExperts& Experts(PolicyBatch& batch) {
  ReplayRouting(batch, 3, 5);
  return batch.samples[2].trajectory.routed_experts;
}

struct Case {
  const char* name;
  std::function<void(PolicyBatch&)> damage;
  absl::StatusCode code;
  const char* path;
  const char* reason = "";
};

// The teacher of sample 2, of a batch that distils.
TeacherTokens& Teacher(PolicyBatch& batch) {
  Distil(batch, loss::DivergenceKind::kReverse);
  return batch.samples[2].teacher;
}

Trajectory& T(PolicyBatch& batch) { return batch.samples[2].trajectory; }

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {"no mask", [](auto& b) { T(b).authorship_mask.clear(); }, kInvalid,
       "samples[2].trajectory.authorship_mask"},
      {"short mask", [](auto& b) { T(b).authorship_mask.pop_back(); }, kInvalid,
       "samples[2].trajectory.authorship_mask"},
      {"author 3", [](auto& b) { T(b).authorship_mask[1] = static_cast<Author>(3); }, kInvalid,
       "samples[2].trajectory.authorship_mask[1]"},
      {"begun by an environment",
       [](auto& b) { T(b).authorship_mask.front() = Author::kEnvironment; }, kInvalid,
       "samples[2].trajectory.authorship_mask[0]"},
      {"ended by an environment",
       [](auto& b) { T(b).authorship_mask.back() = Author::kEnvironment; }, kInvalid,
       "samples[2].trajectory.authorship_mask[6]"},
      {"one of several turns", [](auto& b) { T(b).response_offset = 3; }, kInvalid,
       "samples[2].trajectory.response_offset"},
      {"junior with tandem off", [](auto& b) { T(b).tandem.enabled = false; }, kInvalid,
       "samples[2].trajectory.authorship_mask"},
      {"no junior version", [](auto& b) { T(b).junior_version.clear(); }, kInvalid,
       "samples[2].trajectory.junior_version"},
      {"no log-probs", [](auto& b) { T(b).author_logprobs.clear(); }, kInvalid,
       "samples[2].trajectory.author_logprobs"},
      {"NaN log-prob", [](auto& b) { T(b).author_logprobs[3] = kNan; }, kInvalid,
       "samples[2].trajectory.author_logprobs[3]"},
      {"positive log-prob", [](auto& b) { T(b).author_logprobs[3] = 1; }, kInvalid,
       "samples[2].trajectory.author_logprobs[3]"},
      {"long other log-probs", [](auto& b) { T(b).other_logprobs.push_back(-1); }, kInvalid,
       "samples[2].trajectory.other_logprobs"},
      {"NaN keep mass", [](auto& b) { T(b).log_keep_mass.assign(7, kNan); }, kInvalid,
       "samples[2].trajectory.log_keep_mass[0]"},
      {"no experts", [](auto& b) { Experts(b) = {}; }, kInvalid,
       "samples[2].trajectory.routed_experts"},
      {"experts of another number of layers", [](auto& b) { Experts(b).layers = 6; }, kInvalid,
       "samples[2].trajectory.routed_experts"},
      {"a token without experts",
       [](auto& b) {
         TokenExperts& experts = Experts(b);
         experts.ids.resize(experts.ids.size() - 6);
       },
       kInvalid, "samples[2].trajectory.routed_experts"},
      {"an expert that is not there", [](auto& b) { Experts(b).ids[13] = 5; }, kInvalid,
       "samples[2].trajectory.routed_experts[2]"},
      {"an expert twice",
       [](auto& b) {
         TokenExperts& experts = Experts(b);
         experts.ids[7] = experts.ids[6];
       },
       kInvalid, "samples[2].trajectory.routed_experts[1]"},
      {"no version", [](auto& b) { T(b).senior_versions.clear(); }, kInvalid,
       "samples[2].trajectory.senior_versions"},
      {"versions too short", [](auto& b) { T(b).senior_versions[0].count = 6; }, kInvalid,
       "samples[2].trajectory.senior_versions"},
      {"versions too long", [](auto& b) { T(b).senior_versions[0].count = 8; }, kInvalid,
       "samples[2].trajectory.senior_versions[0].count"},
      {"count overflow",
       [](auto& b) {
         T(b).senior_versions = {{{0, kTestDigest}, 4},
                                 {{0, kTestDigest}, std::numeric_limits<int64_t>::max()}};
       },
       kInvalid, "samples[2].trajectory.senior_versions[1].count"},
      {"unknown version", [](auto& b) { T(b).senior_versions[0].weights.version = 1; },
       kPrecondition, "samples[2].trajectory.senior_versions[0].weights.version",
       "UNKNOWN_POLICY_VERSION"},
      {"another lineage", [](auto& b) { T(b).senior_versions[0].weights.digest = "other"; },
       kPrecondition, "samples[2].trajectory.senior_versions[0].weights.digest", "WEIGHTS_DIFFER"},
      {"no digest", [](auto& b) { T(b).senior_versions[0].weights.digest = ""; }, kInvalid,
       "samples[2].trajectory.senior_versions[0].weights.digest"},
      {"negative version", [](auto& b) { T(b).senior_versions[0].weights.version = -1; }, kInvalid,
       "samples[2].trajectory.senior_versions[0].weights.version"},
      {"no finish reason", [](auto& b) { T(b).finish_reason = FinishReason::kUnspecified; },
       kInvalid, "samples[2].trajectory.finish_reason"},
      {"id too large", [](auto& b) { T(b).response_token_ids[0] = 61; }, kInvalid,
       "samples[2].trajectory.response_token_ids[0]"},
      {"negative id", [](auto& b) { T(b).prompt_token_ids[1] = -1; }, kInvalid,
       "samples[2].trajectory.prompt_token_ids[1]"},
      {"no prompt", [](auto& b) { T(b).prompt_token_ids.clear(); }, kInvalid,
       "samples[2].trajectory.prompt_token_ids"},
      {"too long", [](auto& b) { T(b).prompt_token_ids.assign(30, 1); },
       absl::StatusCode::kOutOfRange, "samples[2].trajectory.response_token_ids"},
      {"no reward", [](auto& b) { b.samples[2].reward.reset(); }, kInvalid, "samples[2].reward"},
      {"NaN reward", [](auto& b) { b.samples[2].reward = kNan; }, kInvalid, "samples[2].reward"},
      {"reward whose square is infinite", [](auto& b) { b.samples[2].reward = 1e308; }, kInvalid,
       "samples[2].reward"},
      {"group of a megabyte", [](auto& b) { b.samples[2].group_id.assign(1 << 20, 'g'); }, kInvalid,
       "samples[2].group_id"},
      {"hot sampling", [](auto& b) { T(b).sampling.temperature = 1e308; }, kInvalid,
       "samples[2].trajectory.sampling.temperature"},
      {"almost greedy sampling", [](auto& b) { T(b).sampling.temperature = 1e-308; }, kInvalid,
       "samples[2].trajectory.sampling.temperature"},
      {"NaN top_p", [](auto& b) { T(b).sampling.top_p = kNan; }, kInvalid,
       "samples[2].trajectory.sampling.top_p"},
      {"negative max_tokens", [](auto& b) { T(b).sampling.max_tokens = -5; }, kInvalid,
       "samples[2].trajectory.sampling.max_tokens"},
      {"stop id outside", [](auto& b) { T(b).sampling.stop_token_ids = {61}; }, kInvalid,
       "samples[2].trajectory.sampling.stop_token_ids[0]"},
      {"NaN prob_senior", [](auto& b) { T(b).tandem.prob_senior = kNan; }, kInvalid,
       "samples[2].trajectory.tandem.prob_senior"},
      {"negative boundary id",
       [](auto& b) {
         T(b).tandem.boundary_token_ids = {3, -5};
       },
       kInvalid, "samples[2].trajectory.tandem.boundary_token_ids[1]"},
      {"no group", [](auto& b) { b.samples[2].group_id.clear(); }, kInvalid, "samples[2].group_id"},
      {"unused advantages", [](auto& b) { b.samples[2].advantages = {1}; }, kInvalid,
       "samples[2].advantages"},
      {"missing advantages",
       [](auto& b) { b.objective.advantage_estimator = AdvantageEstimator::kProvided; }, kInvalid,
       "samples[0].advantages"},
      {"missing old log-probs", [](auto& b) { b.objective.old_logprobs = OldLogprobs::kProvided; },
       kInvalid, "samples[0].old_logprobs"},
      {"weighted junior tokens without the senior's log-probs",
       [](auto& b) {
         b.objective.junior_token_loss_weight = 0.5;
         T(b).other_logprobs.clear();
       },
       kInvalid, "samples[2].trajectory.other_logprobs"},
      {"no samples", [](auto& b) { b.samples.clear(); }, kInvalid, "samples"},
      {"too many samples", [](auto& b) { b.samples.resize(9); }, absl::StatusCode::kOutOfRange,
       "samples"},
      {"weight above 1", [](auto& b) { b.objective.junior_token_loss_weight = 1.5; }, kInvalid,
       "policy.junior_token_loss_weight"},
      {"missing reference log-probs",
       [](auto& b) { b.objective.reference_logprobs = ReferenceLogprobs::kProvided; }, kInvalid,
       "samples[0].reference_logprobs"},
      {"reference log-probs that nobody asked for",
       [](auto& b) { b.samples[1].reference_logprobs.assign(6, -1.0f); }, kInvalid,
       "samples[1].reference_logprobs"},
      {"a teacher that nobody asked for", [](auto& b) { b.samples[1].teacher.name = "t"; },
       kInvalid, "samples[1].teacher"},
      {"no teacher", [](auto& b) { Teacher(b) = {}; }, kInvalid,
       "samples[2].teacher.top_token_ids"},
      {"fewer tokens of the teacher", [](auto& b) { Teacher(b).top_tokens.ids.pop_back(); },
       kInvalid, "samples[2].teacher.top_token_ids"},
      {"another top_k", [](auto& b) { Teacher(b) = TestTeacher("t", 3, 7); }, kInvalid,
       "samples[2].teacher.top_token_ids"},
      {"a token outside the vocabulary", [](auto& b) { Teacher(b).top_tokens.ids[9] = 61; },
       kInvalid, "samples[2].teacher.top_token_ids[2]"},
      {"a token below the vocabulary", [](auto& b) { Teacher(b).top_tokens.ids[9] = -1; }, kInvalid,
       "samples[2].teacher.top_token_ids[2]"},
      {"a token twice",
       [](auto& b) {
         std::vector<int32_t>& ids = Teacher(b).top_tokens.ids;
         ids[5] = ids[7];
       },
       kInvalid, "samples[2].teacher.top_token_ids[1]"},
      {"more mass than there is", [](auto& b) { Teacher(b).top_tokens.logprobs[12] = -0.1f; },
       kInvalid, "samples[2].teacher.top_logprobs[3]"},
      {"a long name of the teacher", [](auto& b) { Teacher(b).name = std::string(5000, 'x'); },
       kInvalid, "samples[2].teacher.name"},
      {"top_k of the whole vocabulary",
       [](auto& b) { Distil(b, loss::DivergenceKind::kReverse, 61); }, kInvalid,
       "policy.distillation.top_k"},
      {"a whole vocabulary without a teacher",
       [](auto& b) { b.objective.distillation.coefficient = 1; }, kPrecondition,
       "policy.distillation.top_k", "NO_TEACHER_MODEL"},
      {"KL without junior", [](auto& b) { b.objective.junior_kl_coefficient = 0.1; }, kPrecondition,
       "policy.junior_kl_kind", "NO_JUNIOR_MODEL"},
      {"GAE without critic",
       [](auto& b) { b.objective.advantage_estimator = AdvantageEstimator::kGae; }, kPrecondition,
       "policy.advantage_estimator", "NO_CRITIC"},
      {"KL without reference", [](auto& b) { b.objective.loss.kl_coefficient = 1; }, kPrecondition,
       "policy.kl_coefficient", "NO_REFERENCE_MODEL"},
  };
  return *cases;
}

TEST(ObjectiveTest, NumbersOutOfBoundsAreRefusedByName) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  using O = PolicyObjective;
  const std::vector<std::pair<const char*, std::function<void(O&)>>> cases = {
      {"junior_token_loss_weight", [](O& o) { o.junior_token_loss_weight = 1.5; }},
      {"junior_token_loss_weight", [](O& o) { o.junior_token_loss_weight = kNan; }},
      {"junior_kl_coefficient", [](O& o) { o.junior_kl_coefficient = -1; }},
      {"clip_ratio_low", [](O& o) { o.loss.clip_ratio_low = 1.1; }},
      {"clip_ratio_high", [](O& o) { o.loss.clip_ratio_high = -0.1; }},
      {"dual_clip", [](O& o) { o.loss.dual_clip = 0.5; }},
      {"clip_ratio_high", [](O& o) { o.loss.clip_ratio_high = 1e308; }},
      {"dual_clip", [=](O& o) { o.loss.dual_clip = kInf; }},
      {"dual_clip", [](O& o) { o.loss.dual_clip = 1e308; }},
      {"kl_coefficient", [](O& o) { o.loss.kl_coefficient = -1; }},
      {"kl_coefficient", [](O& o) { o.loss.kl_coefficient = 1e308; }},
      {"k3_cap", [](O& o) { o.loss.k3_cap = 1e308; }},
      {"entropy_coefficient", [](O& o) { o.loss.entropy_coefficient = kNan; }},
      {"entropy_coefficient", [](O& o) { o.loss.entropy_coefficient = -1e308; }},
      {"importance_sampling_cap", [](O& o) { o.loss.importance_sampling_cap = -1; }},
      {"importance_sampling_cap", [](O& o) { o.loss.importance_sampling_cap = 1e308; }},
      {"importance_sampling_floor", [](O& o) { o.loss.importance_sampling_floor = 0.5; }},
      {"off_policy_mask_threshold", [](O& o) { o.loss.off_policy_mask_threshold = -0.1; }},
      {"off_policy_mask_threshold", [](O& o) { o.loss.off_policy_mask_threshold = kNan; }},
      {"off_policy_mask_threshold", [](O& o) { o.loss.off_policy_mask_threshold = 1e308; }},
      {"norm_constant", [](O& o) { o.scale.norm_constant = -1; }},
      {"norm_constant", [](O& o) { o.scale.norm_constant = 1e-308; }},
      {"norm_constant", [](O& o) { o.scale.norm_constant = 1e308; }},
      {"norm_constant",
       [](O& o) { o.scale.aggregation = loss::Aggregation::kSeqMeanTokenSumNorm; }},
      {"gae_skip_junior_tokens",
       [](O& o) {
         o.gae_skip_junior_tokens = true;
         o.junior_token_loss_weight = 0.5;
       }},
      {"std_epsilon", [](O& o) { o.std_epsilon = 0; }},
      {"std_epsilon", [](O& o) { o.std_epsilon = 2; }},
      {"gae_gamma", [](O& o) { o.gae_gamma = 1.01; }},
      {"gae_lambda", [](O& o) { o.gae_lambda = -0.01; }},
      {"max_staleness", [](O& o) { o.max_staleness = -1; }},
      {"junior_kl_coefficient", [](O& o) { o.junior_kl_coefficient = 1e308; }},
      {"value_clip", [](O& o) { o.value_clip = -1; }},
      {"distillation.coefficient", [](O& o) { o.distillation.coefficient = -1; }},
      {"distillation.coefficient", [](O& o) { o.distillation.coefficient = kNan; }},
      {"distillation.beta", [](O& o) { o.distillation.divergence.beta = 0; }},
      {"distillation.beta", [](O& o) { o.distillation.divergence.beta = 1; }},
      {"distillation.beta", [](O& o) { o.distillation.divergence.beta = kNan; }},
      {"distillation.top_k", [](O& o) { o.distillation.top_k = -1; }},
      {"distillation.top_k", [](O& o) { o.distillation.top_k = 129; }},
      {"distillation.temperature", [](O& o) { o.distillation.temperature = 1e-4; }},
      {"distillation.temperature", [](O& o) { o.distillation.temperature = kNan; }},
      {"rejection_lower", [](O& o) { o.rejection = {.upper = 1, .lower = 2}; }},
      {"importance_sampling_batch_normalize",
       [](O& o) { o.importance_sampling_batch_normalize = true; }},
      {"num_mini_batches", [](O& o) { o.updates.num_mini_batches = 0; }},
      {"num_epochs", [](O& o) { o.updates.num_epochs = -1; }},
      {"kl_estimator",
       [](O& o) {
         o.kl_placement = KlPlacement::kReward;
         o.loss.kl_estimator = loss::KlEstimator::kK3GradientK2;
       }},
      {"kl_importance_correction",
       [](O& o) {
         o.kl_placement = KlPlacement::kReward;
         o.loss.kl_importance_correction = true;
       }},
      {"kl_placement",
       [](O& o) {
         o.kl_placement = KlPlacement::kReward;
         o.advantage_estimator = AdvantageEstimator::kProvided;
       }},
  };
  EXPECT_TRUE(CheckObjective({}, {}).ok());
  for (const auto& [path, spoil] : cases) {
    PolicyObjective objective;
    spoil(objective);
    const absl::Status status = CheckObjective(objective, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_EQ(FieldPath(status), path) << status;
  }
}

TEST(ObjectiveTest, WhatComesWithTheSamplesNeedsNoModel) {
  PolicyObjective objective;
  objective.loss.kl_coefficient = 0.1;
  objective.reference_logprobs = ReferenceLogprobs::kProvided;
  objective.junior_kl_coefficient = 0.1;
  objective.junior_kl_kind = TeacherDirection::kForwardSampled;
  EXPECT_TRUE(CheckObjective(objective, {}).ok());
  objective.reference_logprobs = ReferenceLogprobs::kModel;
  objective.junior_kl_kind = TeacherDirection::kReverse;
  EXPECT_EQ(Reason(CheckObjective(objective, {.junior = true})), "NO_REFERENCE_MODEL");
  EXPECT_EQ(Reason(CheckObjective(objective, {.reference = true})), "NO_JUNIOR_MODEL");
  EXPECT_TRUE(CheckObjective(objective, {.reference = true, .junior = true}).ok());
}

TEST(ObjectiveTest, SupervisedDistillationIsChecked) {
  const auto refused = [](const SupervisedObjective& objective,
                          const ObjectiveSupport& support = {}) {
    return FieldPath(CheckSupervisedObjective(objective, support));
  };
  const DistillationOptions top = {.coefficient = 1, .top_k = 4};
  EXPECT_TRUE(CheckSupervisedObjective({}, {.frozen = true}).ok());
  EXPECT_TRUE(
      CheckSupervisedObjective({.distillation = top, .cross_entropy_coefficient = 0}, {}).ok());
  EXPECT_EQ(refused({.cross_entropy_coefficient = 0}), "cross_entropy_coefficient");
  EXPECT_EQ(refused({.cross_entropy_coefficient = -1}), "cross_entropy_coefficient");
  EXPECT_EQ(refused({.distillation = top}, {.frozen = true}), "distillation");
  EXPECT_EQ(refused({.distillation = {.coefficient = 1}}), "distillation.top_k");
  EXPECT_EQ(refused({.distillation = {.coefficient = 1}}, {.teacher = true}), std::nullopt);
}

TEST(BatchCheckTest, TheTeachersOfSupervisedSamplesAreChecked) {
  SupervisedBatch batch = {.objective = {.distillation = {.coefficient = 1, .top_k = 4}},
                           .samples = {{.prompt_token_ids = {1},
                                        .response_token_ids = {2, 3},
                                        .teacher = TestTeacher("t", 4, 2)}}};
  EXPECT_TRUE(CheckSupervisedBatch(batch, Limits()).ok());
  SupervisedBatch bad = batch;
  bad.samples[0].teacher.top_tokens.ids[6] = 61;
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(bad, Limits())), "samples[0].teacher.top_token_ids[1]");
  bad = batch;
  bad.objective.aggregation = loss::Aggregation::kTokenSum;
  bad.samples[0].weights = {1, -1};
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(bad, Limits())), "samples[0].weights");
  bad = batch;
  bad.objective.distillation = {};
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(bad, Limits())), "samples[0].teacher");
  // The trainer's model says it all.
  bad = batch;
  bad.objective.distillation.top_k = 0;
  BatchLimits limits = Limits();
  limits.support.teacher = true;
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(bad, limits)), "samples[0].teacher.top_token_ids");
  bad.samples[0].teacher.top_tokens = {};
  EXPECT_TRUE(CheckSupervisedBatch(bad, limits).ok());
}

TEST(ObjectiveTest, AFrozenModelHasNone) {
  const absl::Status refused = CheckObjective({}, {.critic = true, .frozen = true});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(Reason(refused), "BASE_MODEL_FROZEN");
}

TEST(BatchCheckTest, GoodBatchPasses) { EXPECT_TRUE(CheckPolicyBatch(TestBatch(), Limits()).ok()); }

TEST(BatchCheckTest, ImportanceWeightsThatAreAllOneAreRefused) {
  PolicyBatch batch = TestBatch();
  PolicyObjective& objective = batch.objective;
  objective.loss.importance_sampling_cap = 2;
  const auto refused = [&] {
    const absl::Status status = CheckPolicyBatch(batch, Limits());
    EXPECT_TRUE(status.ok() || FieldPath(status) == "policy.importance_sampling_cap") << status;
    return !status.ok();
  };
  // The senior's own tokens alone have a weight.
  EXPECT_TRUE(refused());
  objective.junior_token_loss_weight = 0.5;
  EXPECT_FALSE(refused());
  objective.old_logprobs = OldLogprobs::kAuthor;
  EXPECT_TRUE(refused());
  objective.old_logprobs = OldLogprobs::kRecomputed;
  EXPECT_FALSE(refused());

  objective.old_logprobs = OldLogprobs::kSenior;
  for (PolicySample& sample : batch.samples) {
    Trajectory& t = sample.trajectory;
    t.tandem.enabled = false;
    t.authorship_mask.assign(t.authorship_mask.size(), Author::kSenior);
  }
  EXPECT_TRUE(refused());
  objective.loss.importance_sampling_cap = 0.5;  // every weight is the cap
  EXPECT_FALSE(refused());
  objective.loss.importance_sampling_cap = 2;
  Trajectory& cut = batch.samples[0].trajectory;
  cut.log_keep_mass.assign(cut.response_token_ids.size(), -0.1f);
  EXPECT_FALSE(refused());
}

TEST(BatchCheckTest, RejectionThatKeepsEveryTokenIsRefused) {
  PolicyBatch batch = TestBatch();
  PolicyObjective& objective = batch.objective;
  const auto refused = [&](const loss::RejectionOptions& rejection) {
    objective.rejection = rejection;
    const absl::Status status = CheckPolicyBatch(batch, Limits());
    EXPECT_TRUE(status.ok() || FieldPath(status) == "policy.rejection_upper") << status;
    return !status.ok();
  };
  // The senior's own tokens alone have a weight.
  EXPECT_TRUE(refused({.upper = 2, .lower = 0.5}));
  EXPECT_TRUE(refused({.estimator = loss::KlEstimator::kK3, .upper = 1e-3}));
  EXPECT_FALSE(refused({.upper = 0.5}));  // every token is rejected
  EXPECT_FALSE(refused({.upper = 2, .lower = 1.5}));
  EXPECT_FALSE(refused({}));
  objective.junior_token_loss_weight = 0.5;
  EXPECT_FALSE(refused({.upper = 2}));
  objective.old_logprobs = OldLogprobs::kAuthor;
  EXPECT_TRUE(refused({.upper = 2}));
  objective.old_logprobs = OldLogprobs::kRecomputed;
  EXPECT_FALSE(refused({.upper = 2}));
}

TEST(BatchCheckTest, ARewardOutOfBoundsIsNamedWithItsBounds) {
  for (const double reward :
       {1e300, -1e300, std::numeric_limits<double>::infinity(), double{kNan}}) {
    PolicyBatch batch = TestBatch();
    batch.samples[2].reward = reward;
    const absl::Status status = CheckPolicyBatch(batch, Limits());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldPath(status), "samples[2].reward");
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("[-1e+09, 1e+09]"));
  }
}

TEST(BatchCheckTest, ReinforcePlusPlusNeedsNoGroups) {
  PolicyBatch batch = TestBatch();
  for (PolicySample& sample : batch.samples) sample.group_id.clear();
  batch.objective.advantage_estimator = AdvantageEstimator::kReinforcePlusPlus;
  EXPECT_TRUE(CheckPolicyBatch(batch, Limits()).ok());
  batch.samples[1].reward.reset();
  EXPECT_EQ(FieldPath(CheckPolicyBatch(batch, Limits())), "samples[1].reward");
}

TEST(BatchCheckTest, EveryDamageIsRefusedWithCodeAndPath) {
  for (const Case& c : Cases()) {
    PolicyBatch batch = TestBatch();
    c.damage(batch);
    const absl::Status status = CheckPolicyBatch(batch, Limits());
    EXPECT_EQ(status.code(), c.code) << c.name << ": " << status;
    EXPECT_EQ(FieldPath(status).value_or(""), c.path) << c.name;
    EXPECT_EQ(Reason(status).value_or(""), c.reason) << c.name;
  }
}

TEST(BatchCheckTest, StalenessIsBounded) {
  BatchLimits limits = Limits();
  limits.version = 3;
  PolicyBatch batch = TestBatch();
  batch.objective.max_staleness = 3;
  EXPECT_TRUE(CheckPolicyBatch(batch, limits).ok());
  batch.objective.max_staleness = 2;
  const absl::Status status = CheckPolicyBatch(batch, limits);
  EXPECT_EQ(Reason(status), "TRAJECTORY_TOO_OLD");
  EXPECT_EQ(FieldPath(status), "samples[0].trajectory.senior_versions[0].weights.version");
}

TEST(BatchCheckTest, AVersionWhoseDigestIsNoLongerKnownIsTooOld) {
  training::WeightsLineage lineage(1);
  lineage.Record({0, kTestDigest});
  lineage.Record({1, "other"});
  BatchLimits limits = Limits();
  limits.version = 1;
  limits.lineage = &lineage;
  PolicyBatch batch = TestBatch();
  batch.objective.max_staleness = 1;
  EXPECT_EQ(Reason(CheckPolicyBatch(batch, limits)), "TRAJECTORY_TOO_OLD");
}

TEST(BatchCheckTest, StaleSamplesPassWhereTheyAreDropped) {
  training::WeightsLineage lineage;
  lineage.Record({0, kTestDigest});
  lineage.Record({3, "third"});
  BatchLimits limits = Limits();
  limits.version = 3;
  limits.lineage = &lineage;
  PolicyBatch batch = TestBatch();
  batch.objective.stale_samples = StaleSamples::kDrop;
  // One token of the first sample is of version 3; its oldest token decides.
  Trajectory& first = batch.samples[0].trajectory;
  first.senior_versions = {{{3, "third"}, 1}, {{0, kTestDigest}, 4}};
  batch.samples[1].trajectory.senior_versions = {{{3, "third"}, 6}};
  EXPECT_TRUE(CheckPolicyBatch(batch, limits).ok());
  const auto kept = [&](int64_t max_staleness) {
    batch.objective.max_staleness = max_staleness;
    return WithoutStale(batch, limits).samples;
  };
  ASSERT_EQ(kept(2).size(), 1u);
  EXPECT_EQ(kept(2)[0].trajectory.prompt_token_ids, batch.samples[1].trajectory.prompt_token_ids);
  EXPECT_EQ(kept(0).size(), 1u);
  EXPECT_EQ(kept(3).size(), batch.samples.size());
  batch.objective.max_staleness = 0;
  // Samples that would be dropped are checked all the same.
  first.senior_versions[0].weights.version = 4;
  EXPECT_EQ(Reason(CheckPolicyBatch(batch, limits)), "UNKNOWN_POLICY_VERSION");
}

TEST(BatchCheckTest, SupervisedSamplesAreChecked) {
  SupervisedBatch batch;
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(batch, Limits())), "samples");
  batch.samples = {{.prompt_token_ids = {1}, .response_token_ids = {2}},
                   {.prompt_token_ids = {1}, .response_token_ids = {}}};
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(batch, Limits())), "samples[1].response_token_ids");
}

TEST(BatchCheckTest, WeightsNeedASum) {
  SupervisedBatch batch;
  batch.samples = {{.prompt_token_ids = {1}, .response_token_ids = {2}},
                   {.prompt_token_ids = {1}, .response_token_ids = {2}, .weights = {-1}}};
  EXPECT_EQ(FieldPath(CheckSupervisedBatch(batch, Limits())), "samples[1].weights");
  batch.objective.aggregation = loss::Aggregation::kTokenSum;
  EXPECT_TRUE(CheckSupervisedBatch(batch, Limits()).ok());
}

}  // namespace
}  // namespace tandem::trainer
