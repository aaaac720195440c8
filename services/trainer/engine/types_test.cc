#include "services/trainer/engine/types.h"

#include <gtest/gtest.h>

#include "common/base/struct_bytes.h"
#include "common/coauthoring/testing/authors.h"
#include "services/training_core/testing/survives_as_bytes.h"

namespace tandem::trainer {
namespace {

using training::ExpectSurvives;
using training::SomeBlobs;
using training::SomeImages;

Trajectory SomeTrajectory() {
  return {.prompt_token_ids = {1, 2},
          .response_token_ids = {3, 4, 5},
          .authorship_mask = Authors("SJS"),
          .author_logprobs = {-0.5f, -1.5f, -2.5f},
          .other_logprobs = {-1, -2, -3},
          .log_keep_mass = {-0.25f, 0, -0.125f},
          .senior_versions = {{.weights = {4, "digest-4"}, .count = 2},
                              {.weights = {5, "digest-5"}, .count = 1}},
          .junior_version = "junior",
          .finish_reason = FinishReason::kLength,
          .seed = ~uint64_t{0},
          .sample_index = 7,
          .sampling = {.temperature = 0.5,
                       .top_k = 11,
                       .top_p = 0.75,
                       .min_p = 0.0625,
                       .max_tokens = 3,
                       .stop_token_ids = {9, 10},
                       .ignore_eos = true,
                       .stop = {"</answer>", "\n\n"}},
          .tandem = {.enabled = false,
                     .selection_strategy = SelectionStrategy::kWord,
                     .prob_senior = 0.25,
                     .chunk_size = 6,
                     .max_gap_tokens = 33,
                     .boundary_token_ids = {12}},
          .routed_experts = {.layers = 2, .experts_per_token = 3, .ids = {1, 2, 400, 0, 5, 6}},
          .vision_inputs = SomeImages(),
          .response_offset = 6,
          .top_tokens = {.count = 1, .ids = {4}, .logprobs = {-1.5f}}};
}

DistillationOptions SomeDistillation() {
  return {.coefficient = 0.5,
          .divergence = {.kind = loss::DivergenceKind::kJensenShannon, .beta = 0.25},
          .top_k = 16,
          .temperature = 2};
}

TeacherTokens SomeTeacher() {
  return {.name = "math",
          .top_tokens = {.count = 2, .ids = {4, 5, 6, 7}, .logprobs = {-1, -2, -3, -4}}};
}

PolicyObjective SomeObjective() {
  return {.loss = {.kind = loss::PolicyLossKind::kCispo,
                   .clip_ratio_low = 0.1,
                   .clip_ratio_high = 0.3,
                   .dual_clip = 3,
                   .kl_estimator = loss::KlEstimator::kK3GradientK2,
                   .kl_coefficient = 0.01,
                   .k3_cap = 10,
                   .kl_importance_correction = true,
                   .entropy_coefficient = -0.5,
                   .importance_sampling_cap = 2,
                   .importance_sampling_floor = 0.5,
                   .importance_sampling_level = loss::ImportanceSamplingLevel::kSequence,
                   .importance_sampling_mode = loss::ImportanceSamplingMode::kMask,
                   .off_policy_mask_threshold = 0.25},
          .junior_token_loss_weight = 0.125,
          .mask_truncated_completions = true,
          .old_logprobs = OldLogprobs::kProvided,
          .advantage_estimator = AdvantageEstimator::kProvided,
          .std_epsilon = 1e-4,
          .scale = {.aggregation = loss::Aggregation::kSeqMeanTokenSumNorm,
                    .normalizer = loss::Normalizer::kSumOfWeights,
                    .norm_constant = 100},
          .kl_placement = KlPlacement::kReward,
          .reference_logprobs = ReferenceLogprobs::kProvided,
          .junior_kl_coefficient = 0.75,
          .junior_kl_kind = TeacherDirection::kForwardSampled,
          .gae_gamma = 0.99,
          .gae_lambda = 0.95,
          .bootstrap_truncated = true,
          .gae_skip_junior_tokens = true,
          .whiten_advantages = true,
          .max_staleness = 2,
          .stale_samples = StaleSamples::kDrop,
          .updates = {.num_mini_batches = 4, .num_epochs = 3},
          .value_clip = 0.4,
          .importance_sampling_batch_normalize = true,
          .rejection = {.level = loss::RejectionLevel::kSequenceMax,
                        .estimator = loss::KlEstimator::kK2,
                        .upper = 5,
                        .lower = 0.2},
          .routing_replay = true,
          .distillation = SomeDistillation()};
}

TrainStepRequest SomeStep() {
  TrainStepRequest request;
  request.run_id = "run";
  request.step = 3;
  request.request_id = "request";
  request.payload_digest = "payload";
  request.expected_version = 5;
  request.defer_digest = true;
  request.blobs = SomeBlobs();
  request.optimizer = {.learning_rate = 0.125,
                       .beta1 = 0.5,
                       .beta2 = 0.75,
                       .epsilon = 1e-3,
                       .weight_decay = 0.25,
                       .max_grad_norm = 2};
  return request;
}

TEST(TypesTest, APolicyStepSurvivesAsBytes) {
  TrainStepRequest request = SomeStep();
  const PolicySample sample = {.trajectory = SomeTrajectory(),
                               .group_id = "group",
                               .reward = 0.5,
                               .advantages = {1, 2, 3},
                               .old_logprobs = {-1, -2, -4},
                               .reference_logprobs = {-3, -4, -5},
                               .teacher = SomeTeacher()};
  request.batch = PolicyBatch{.objective = SomeObjective(), .samples = {sample, sample}};
  ExpectSurvives(request);
}

TEST(TypesTest, ASampleWithLittleSurvivesAsBytes) {
  TrainStepRequest request;
  request.batch = PolicyBatch{.objective = {}, .samples = {PolicySample()}};
  EXPECT_EQ(FromBytes<TrainStepRequest>(ToBytes(request)).value(), request);
}

TEST(TypesTest, ASupervisedStepSurvivesAsBytes) {
  TrainStepRequest request = SomeStep();
  request.batch = SupervisedBatch{.objective = {.aggregation = loss::Aggregation::kSeqMeanTokenSum,
                                                .distillation = SomeDistillation(),
                                                .cross_entropy_coefficient = 0.5},
                                  .samples = {{.prompt_token_ids = {1},
                                               .response_token_ids = {2, 3},
                                               .vision_inputs = SomeImages(),
                                               .weights = {0.5, -2},
                                               .teacher = SomeTeacher()}}};
  ExpectSurvives(request);
}

TEST(TypesTest, ARequestForLogProbsSurvivesAsBytes) {
  ExpectSurvives(LogProbsRequest{.prompt_token_ids = {1, 2},
                                 .response_token_ids = {3},
                                 .temperature = 0.5,
                                 .vision_inputs = SomeImages(),
                                 .blobs = SomeBlobs(),
                                 .reference = true});
}

}  // namespace
}  // namespace tandem::trainer
