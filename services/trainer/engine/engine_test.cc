#include "services/trainer/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/base/steady_time.h"
#include "common/model/testing/padded_model.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/weights/testing/stream_digest.h"
#include "services/trainer/engine/testing/engine_fixture.h"
#include "services/training_core/testing/only_result.h"

namespace tandem::trainer {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;

// Rewards 0 and 1 in each group: advantage -+ 1/sqrt(2) (std with ddof 1 is 1/sqrt(2)).
double TestAdvantage(const PolicySample& sample) {
  return (*sample.reward - 0.5) / (std::sqrt(0.5) + 1e-6);
}

// Returns weight 1 for the senior's tokens and `junior` for the junior's, [T].
at::Tensor AuthorWeights(const Trajectory& t, double junior) {
  std::vector<float> mask;
  for (const Author author : t.authorship_mask) mask.push_back(IsPolicy(author) ? 1 : 0);
  return at::tensor(mask) * (1 - junior) + junior;
}

TEST_F(TrainerEngineTest, PolicyStepRaisesWhatWasRewarded) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*engine, batch);
  const auto mean = [&](size_t sample) {
    const Trajectory& t = batch.samples[sample].trajectory;
    const auto logprobs = LogProbsOf(*engine, t.prompt_token_ids, t.response_token_ids);
    double sum = 0;
    for (size_t i = 0; i < logprobs.size(); ++i)
      sum += IsPolicy(t.authorship_mask[i]) ? logprobs[i] : 0;
    return sum;
  };
  const double good = mean(1), bad = mean(0);
  const StepResult result = Step(*engine, TestRequest(batch));
  EXPECT_FALSE(result.replayed);
  EXPECT_FALSE(result.report.skipped);
  EXPECT_EQ(result.report.weights.version, 1);
  EXPECT_EQ(engine->Info().optimizer_steps, 1);
  EXPECT_GT(mean(1), good);
  EXPECT_LT(mean(0), bad);
}

TEST_F(TrainerEngineTest, FirstStepHasRatioOneNoKlAndNoMismatch) {
  for (const char* family : {"llama", "gemma2"}) {  // without and with soft caps
    EngineOptions options = Options();
    WriteTinyModel(options.model, /*seed=*/3, {}, family);
    options.reference_model = options.model;
    auto engine = Make(options);
    PolicyBatch batch = TestBatch();
    batch.samples[0].trajectory.sampling.temperature = 0.7;
    RecordLogProbs(*engine, batch);
    batch.objective.loss.kl_estimator = loss::KlEstimator::kK3;
    batch.objective.loss.kl_coefficient = 0.1;
    auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
    // The rollout records float32: equal up to rounding.
    EXPECT_NEAR(metrics["policy/mean_ratio"], 1, 1e-6) << family;
    EXPECT_LT(std::abs(metrics["policy/ppo_kl"]), 1e-6) << family;
    EXPECT_LT(metrics["policy/kl_to_ref"], 1e-8) << family;
    EXPECT_LT(metrics["mismatch/max_abs_logprob_diff"], 1e-5) << family;
    EXPECT_LT(std::abs(metrics["mismatch/k3"]), 1e-8) << family;
    EXPECT_NEAR(metrics["mismatch/effective_sample_size"], 1, 1e-8) << family;
    EXPECT_EQ(metrics["policy/clip_fraction"], 0) << family;
  }
}

TEST_F(TrainerEngineTest, RecomputedOldLogProbsGiveRatioExactlyOne) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_EQ(metrics["policy/mean_ratio"], 1);
  EXPECT_EQ(metrics["policy/ppo_kl"], 0);
}

TEST_F(TrainerEngineTest, GradientEqualsAutogradOverWholeLogits) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  batch.objective.junior_token_loss_weight = 0.3;
  batch.objective.scale.normalizer = loss::Normalizer::kAllTokens;
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;

  const AutogradOracle oracle(folder_ / "model");
  at::Tensor loss = at::zeros({});
  int64_t tokens = 0;
  for (const PolicySample& sample : batch.samples) {
    const at::Tensor logprobs = oracle.LogProbs(sample.trajectory);
    loss = loss - (logprobs * AuthorWeights(sample.trajectory, 0.3)).sum() * TestAdvantage(sample);
    tokens += logprobs.size(0);
  }
  const double norm = oracle.GradientNorm(loss / tokens);
  EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
}

// The batch is stale, so that GSPO's ratios are not 1.
TEST_F(TrainerEngineTest, GspoGradientEqualsAutogradOverWholeLogits) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*engine, batch);
  for (PolicySample& sample : batch.samples) {
    float shift = 0.02f;
    for (float& logprob : sample.trajectory.author_logprobs) logprob -= (shift += 0.01f);
    sample.trajectory.other_logprobs = sample.trajectory.author_logprobs;
  }
  batch.objective.loss.kind = loss::PolicyLossKind::kGspo;
  batch.objective.loss.clip_ratio_high = 0.1;  // clips some sequences
  batch.objective.junior_token_loss_weight = 0.3;
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_GT(metrics["policy/mean_ratio"], 1);

  const AutogradOracle oracle(folder_ / "model");
  at::Tensor loss = at::zeros({});
  int64_t tokens = 0;
  for (const PolicySample& sample : batch.samples) {
    const Trajectory& t = sample.trajectory;
    const double advantage = TestAdvantage(sample);
    const at::Tensor logprobs = oracle.LogProbs(t);
    const at::Tensor ratio = (logprobs - at::tensor(t.author_logprobs)).mean().exp();
    loss = loss - at::min(ratio * advantage, ratio.clamp(0.8, 1.1) * advantage) *
                      AuthorWeights(t, 0.3).sum();
    tokens += logprobs.size(0);
  }
  loss = loss / tokens;
  const double norm = oracle.GradientNorm(loss);
  EXPECT_NEAR(metrics["loss/policy"], loss.item<double>(), 1e-5 * std::abs(loss.item<double>()));
  EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
}

// The rollout's log-probs are not the trainer's; the weights are constants for the gradient.
TEST_F(TrainerEngineTest, ImportanceWeightsOfSequencesEqualAutogradOverWholeLogits) {
  EngineOptions options = Options();
  options.micro_batch_tokens = 9;
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*Make(options), batch);
  float shift = 0;
  for (PolicySample& sample : batch.samples) {
    shift += 0.01f;  // the sequence's ratio: 1.05 to 1.38
    for (float& logprob : sample.trajectory.author_logprobs) logprob -= shift;
  }
  PolicyObjective& objective = batch.objective;
  objective.old_logprobs = OldLogprobs::kRecomputed;
  objective.junior_token_loss_weight = 0.3;
  objective.loss.importance_sampling_cap = 1.2;
  objective.loss.importance_sampling_level = loss::ImportanceSamplingLevel::kSequence;
  for (const auto mode :
       {loss::ImportanceSamplingMode::kTruncate, loss::ImportanceSamplingMode::kMask}) {
    objective.loss.importance_sampling_mode = mode;
    auto metrics = Step(*Make(options), TestRequest(batch)).report.metrics;

    const AutogradOracle oracle(folder_ / "model");
    at::Tensor loss = at::zeros({});
    int64_t tokens = 0, masked = 0;
    for (const PolicySample& sample : batch.samples) {
      const Trajectory& t = sample.trajectory;
      const at::Tensor logprobs = oracle.LogProbs(t);
      double weight =
          (logprobs.detach() - at::tensor(t.author_logprobs)).sum().exp().item<double>();
      const bool mask = mode == loss::ImportanceSamplingMode::kMask && weight > 1.2;
      weight = mask ? 0 : std::min(weight, 1.2);
      loss = loss - (logprobs * AuthorWeights(t, 0.3)).sum() * TestAdvantage(sample) * weight;
      tokens += logprobs.size(0);
      masked += mask ? logprobs.size(0) : 0;
    }
    const double norm = oracle.GradientNorm(loss / tokens);
    EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
    EXPECT_DOUBLE_EQ(metrics["mismatch/masked_fraction"],
                     static_cast<double>(masked) / static_cast<double>(tokens));
    EXPECT_EQ(masked > 0, mode == loss::ImportanceSamplingMode::kMask);
  }
}

TEST_F(TrainerEngineTest, MicroBatchingDoesNotChangeTheStep) {
  PolicyBatch batch = TestBatch();
  batch.objective.junior_token_loss_weight = 0.5;
  EngineOptions small = Options();
  small.micro_batch_tokens = 9;
  small.optimizer.learning_rate = 1e-3;
  EngineOptions large = small;
  large.micro_batch_tokens = 4096;
  auto a = Make(small), b = Make(large);
  auto first = Step(*a, TestRequest(batch)).report.metrics;
  auto second = Step(*b, TestRequest(batch)).report.metrics;
  EXPECT_EQ(first["policy/micro_batches"], 4);
  EXPECT_EQ(second["policy/micro_batches"], 1);
  for (const char* name : {"loss/total", "policy/grad_norm", "policy/ppo_kl", "policy/entropy"}) {
    EXPECT_NEAR(first[name], second[name], 1e-5 * std::max(1.0, std::abs(second[name]))) << name;
  }
  const Trajectory& t = batch.samples[0].trajectory;
  const auto x = LogProbsOf(*a, t.prompt_token_ids, t.response_token_ids);
  const auto y = LogProbsOf(*b, t.prompt_token_ids, t.response_token_ids);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-3);
}

// A step with ATen kernels, which a GPU runs, has the results of one with the CPU's kernels, in
// both types.
TEST_F(TrainerEngineTest, TheOtherKernelsAndTypesTakeTheSameStep) {
  const auto step_with = [&](const std::string& dtype, const std::string& kernels) {
    EngineOptions options = Options();
    options.compute.dtype = dtype;
    options.compute.kernels = kernels;
    PolicyBatch batch = TestBatch();
    batch.objective.old_logprobs = OldLogprobs::kRecomputed;
    batch.objective.junior_token_loss_weight = 0.5;
    return Step(*Make(options), TestRequest(batch)).report.metrics;
  };
  auto expected = step_with("float32", "auto");
  auto aten = step_with("float32", "aten");
  auto bfloat16 = step_with("bfloat16", "auto");
  for (const char* name : {"policy/grad_norm", "policy/entropy"}) {
    const double scale = std::abs(expected[name]);
    EXPECT_NEAR(aten[name], expected[name], 1e-6 * scale) << name;
    EXPECT_NEAR(bfloat16[name], expected[name], 0.01 * scale) << name;
    EXPECT_NE(bfloat16[name], expected[name]) << name;
  }
}

TEST_F(TrainerEngineTest, BFloat16LearnsOnFloat32Masters) {
  EngineOptions options = Options();
  options.compute.dtype = "bfloat16";
  // Less than half of the distance between bfloat16 numbers near 0.1.
  options.optimizer.learning_rate = 1e-4;
  auto engine = Make(options);
  TrainStepRequest request = TestRequest();
  SupervisedBatch batch;
  batch.samples = {{.prompt_token_ids = {1, 5}, .response_token_ids = {9, 30, 8, 2}},
                   {.prompt_token_ids = {4}, .response_token_ids = {11, 3, 40}}};
  request.batch = batch;
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) {
    request.step = step + 1;
    request.request_id = std::to_string(step);
    request.expected_version = step;
    losses.push_back(Step(*engine, request).report.metrics["loss/total"]);
  }
  EXPECT_LT(losses.back(), losses.front() - 0.1);
  // The passes read the updated weights, and the export has every bit of them.
  ASSERT_TRUE(engine->ExportModel({}, folder_ / "exported", DType::kFloat32).ok());
  EngineOptions exported = options;
  exported.model = folder_ / "exported";
  auto again = Make(exported);
  EXPECT_EQ(Digest(*again), Digest(*engine));
  EXPECT_EQ(LogProbsOf(*again, {1, 5}, {9, 30, 8, 2}), LogProbsOf(*engine, {1, 5}, {9, 30, 8, 2}));
}

TEST_F(TrainerEngineTest, AllJuniorBatchIsSkippedAndChangesNothing) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  for (PolicySample& sample : batch.samples) {
    for (Author& author : sample.trajectory.authorship_mask) author = Author::kJunior;
  }
  const std::string before = Digest(*engine);
  const StepResult result = Step(*engine, TestRequest(batch));
  EXPECT_TRUE(result.report.skipped);
  EXPECT_THAT(result.report.skip_reason, HasSubstr("junior_token_loss_weight"));
  EXPECT_THAT(result.report.skip_reason, Not(HasSubstr("cut by length")));
  EXPECT_EQ(result.report.weights.version, 0);
  EXPECT_EQ(result.report.metrics.at("tandem/junior_token_fraction"), 1);
  EXPECT_EQ(Digest(*engine), before);
  EXPECT_EQ(engine->Info().optimizer_steps, 0);
  EXPECT_TRUE(Step(*engine, TestRequest(batch)).replayed);
}

TEST_F(TrainerEngineTest, ABatchOfResponsesThatWereCutIsSkippedWhereTheyAreMasked) {
  auto engine = Make();
  PolicyBatch batch = TestBatch();
  batch.objective.mask_truncated_completions = true;
  for (PolicySample& sample : batch.samples) {
    sample.trajectory.finish_reason = FinishReason::kLength;
  }
  const StepResult result = Step(*engine, TestRequest(batch));
  EXPECT_TRUE(result.report.skipped);
  EXPECT_THAT(result.report.skip_reason, HasSubstr("every response was cut by length"));
  EXPECT_THAT(result.report.skip_reason, Not(HasSubstr("junior")));
  EXPECT_EQ(engine->Info().optimizer_steps, 0);
}

TEST_F(TrainerEngineTest, AllSeniorEqualsTandemSwitchedOffBitForBit) {
  PolicyBatch on = TestBatch();
  for (PolicySample& sample : on.samples) {
    for (Author& author : sample.trajectory.authorship_mask) author = Author::kSenior;
  }
  PolicyBatch off = on;
  for (PolicySample& sample : off.samples) {
    sample.trajectory.tandem.enabled = false;
    sample.trajectory.junior_version.clear();
    sample.trajectory.other_logprobs.clear();
  }
  auto a = Make(), b = Make();
  for (int step = 0; step < 3; ++step) {
    for (auto* pair : {&on, &off}) {
      TrainStepRequest request = TestRequest(*pair);
      request.request_id = std::to_string(step);
      request.expected_version = step;
      std::get<PolicyBatch>(request.batch).objective.max_staleness = 3;
      Step(pair == &on ? *a : *b, request);
    }
  }
  EXPECT_EQ(Digest(*a), Digest(*b));
}

TEST_F(TrainerEngineTest, SameInputsGiveTheSameBits) {
  auto a = Make(), b = Make();
  const auto x = Step(*a, TestRequest()).report.metrics;
  const auto y = Step(*b, TestRequest()).report.metrics;
  EXPECT_EQ(x, y);
  EXPECT_EQ(Digest(*a), Digest(*b));
}

TEST_F(TrainerEngineTest, RepeatIsAnsweredFromTheTable) {
  auto engine = Make();
  const StepResult first = Step(*engine, TestRequest());
  const std::string digest = Digest(*engine);
  const StepResult second = Step(*engine, TestRequest());
  EXPECT_TRUE(second.replayed);
  EXPECT_EQ(second.report.metrics, first.report.metrics);
  EXPECT_EQ(second.report.weights.version, 1);
  EXPECT_EQ(Digest(*engine), digest);

  TrainStepRequest other = TestRequest();
  other.payload_digest = "payload-2";
  const absl::Status reused = engine->TrainStep({}, Stamped(*engine, other)).status();
  EXPECT_EQ(reused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Reason(reused), "REQUEST_ID_REUSED");
}

TEST_F(TrainerEngineTest, StaleVersionIsRefused) {
  auto engine = Make();
  Step(*engine, TestRequest());
  TrainStepRequest request = TestRequest();
  request.request_id = "request-2";
  const absl::Status status = engine->TrainStep({}, Stamped(*engine, request)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reason(status), "STALE_POLICY_VERSION");
  EXPECT_EQ(FieldPath(status), "expected_version");
}

TEST_F(TrainerEngineTest, StaleSamplesAreDroppedAsIfTheyHadNotBeenSent) {
  auto a = Make(), b = Make();
  Step(*a, TestRequest());
  Step(*b, TestRequest());
  TrainStepRequest request = TestRequest();
  request.request_id = "second";
  request.expected_version = 1;
  auto& batch = std::get<PolicyBatch>(request.batch);
  batch.objective.stale_samples = StaleSamples::kDrop;
  batch.objective.scale.aggregation = loss::Aggregation::kSeqMeanTokenSum;
  const WeightsVersion old = Make()->Info().weights;  // version 0
  batch.samples[3].trajectory.senior_versions = {{.weights = old, .count = 8}};
  const StepResult dropped = Step(*a, request);
  batch.samples.pop_back();
  const StepResult without = Step(*b, request);
  EXPECT_EQ(dropped.report.metrics.at("policy/dropped_samples"), 1);
  EXPECT_EQ(without.report.metrics.at("policy/dropped_samples"), 0);
  EXPECT_EQ(dropped.report.metrics.at("tokens/response"), 5 + 6 + 7);
  EXPECT_EQ(Digest(*a), Digest(*b));
}

TEST_F(TrainerEngineTest, AStepOfStaleSamplesAloneIsSkipped) {
  auto engine = Make();
  TrainStepRequest request = TestRequest();
  for (PolicySample& sample : std::get<PolicyBatch>(request.batch).samples) {
    sample.trajectory.senior_versions[0].weights = engine->Info().weights;
  }
  Step(*engine, request);
  request.request_id = "second";
  request.expected_version = 1;
  EXPECT_EQ(Reason(engine->TrainStep({}, request).status()), "TRAJECTORY_TOO_OLD");
  std::get<PolicyBatch>(request.batch).objective.stale_samples = StaleSamples::kDrop;
  const std::string before = Digest(*engine);
  const StepResult result = Step(*engine, request);
  EXPECT_TRUE(result.report.skipped);
  EXPECT_FALSE(result.not_finite);
  EXPECT_THAT(result.report.skip_reason, HasSubstr("max_staleness"));
  EXPECT_EQ(result.report.metrics.at("policy/dropped_samples"), 4);
  EXPECT_EQ(Digest(*engine), before);
}

TEST_F(TrainerEngineTest, BadBatchChangesNothing) {
  auto engine = Make();
  const std::string before = Digest(*engine);
  TrainStepRequest request = TestRequest();
  std::get<PolicyBatch>(request.batch).samples[1].trajectory.authorship_mask.clear();
  EXPECT_EQ(FieldPath(engine->TrainStep({}, Stamped(*engine, request)).status()),
            "samples[1].trajectory.authorship_mask");
  EXPECT_EQ(Digest(*engine), before);
  EXPECT_FALSE(Step(*engine, TestRequest()).replayed);
}

TEST_F(TrainerEngineTest, AGradientThatIsNotFiniteSkipsTheStepAndTheEngineGoesOn) {
  auto engine = Make();
  const std::string before = Digest(*engine);
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kProvided;
  batch.objective.scale.aggregation = loss::Aggregation::kTokenSum;
  for (PolicySample& sample : batch.samples) {
    sample.advantages.assign(sample.trajectory.response_token_ids.size(), 3e38f);
  }
  TrainStepRequest request = TestRequest(batch);
  request.request_id = "bad";
  const StepResult result = Step(*engine, request);
  EXPECT_TRUE(result.report.skipped);
  EXPECT_TRUE(result.not_finite);
  EXPECT_THAT(result.report.skip_reason, HasSubstr("gradient norm"));
  EXPECT_FALSE(result.report.metrics.contains("policy/grad_norm"));
  EXPECT_EQ(Digest(*engine), before);
  EXPECT_EQ(engine->Info().weights.version, 0);
  auto clean = Make();
  Step(*clean, TestRequest());
  Step(*engine, TestRequest());
  EXPECT_EQ(Digest(*engine), Digest(*clean));
}

TEST_F(TrainerEngineTest, AModelThatOverflowsSkipsItsStepsAndKeepsItsWeights) {
  auto engine = Make(Overflowing());
  const std::string before = Digest(*engine);
  SupervisedBatch supervised;
  supervised.samples = {{.prompt_token_ids = {1, 5}, .response_token_ids = {9, 2}}};
  TrainStepRequest requests[] = {TestRequest(), TestRequest(), TestRequest()};
  std::get<PolicyBatch>(requests[1].batch).objective.loss.kind = loss::PolicyLossKind::kGspo;
  requests[2].batch = supervised;
  for (TrainStepRequest& request : requests) {
    request.request_id = std::to_string(&request - requests);
    const StepResult result = Step(*engine, request);
    EXPECT_TRUE(result.report.skipped);
    EXPECT_TRUE(result.not_finite);
    EXPECT_THAT(result.report.skip_reason, HasSubstr("not finite"));
    EXPECT_EQ(result.report.weights.version, 0);
  }
  EXPECT_EQ(Digest(*engine), before);
  EXPECT_EQ(engine->Info().optimizer_steps, 0);
}

// The largest numbers that pass the checks train.
TEST_F(TrainerEngineTest, TheLargestNumbersThatAreAcceptedStayFinite) {
  EngineOptions options = Options();
  options.reference_model = options.model;
  auto engine = Make(options);
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*engine, batch);
  for (PolicySample& sample : batch.samples) sample.reward = *sample.reward > 0 ? 1e9 : -1e9;
  PolicyObjective& objective = batch.objective;
  objective.advantage_estimator = AdvantageEstimator::kGroupRelativeNoStd;
  objective.scale.aggregation = loss::Aggregation::kTokenSum;
  objective.loss.clip_ratio_high = 1e9;
  objective.loss.dual_clip = 1e9;
  objective.loss.kl_estimator = loss::KlEstimator::kK3;
  objective.loss.kl_coefficient = 1e9;
  objective.loss.entropy_coefficient = 1e9;
  objective.old_logprobs = OldLogprobs::kRecomputed;
  objective.loss.importance_sampling_cap = 1e9;
  for (const auto& [name, value] : Step(*engine, TestRequest(batch)).report.metrics) {
    EXPECT_TRUE(std::isfinite(value)) << name;
  }
  EXPECT_EQ(engine->Info().weights.version, 1);
}

TEST_F(TrainerEngineTest, ATemperatureThatNoRolloutHasIsRefusedByName) {
  auto engine = Make();
  for (const double temperature : {0.0, 1e-308, 1e308, -1.0}) {
    const absl::Status status =
        training::OnlyResult(engine->ComputeLogProbs({}, {{{{1}, {2}, temperature}}})).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(FieldPath(status), "temperature");
  }
}

// The reference stays, whatever the model learns; a batch may ask for both.
TEST_F(TrainerEngineTest, LogProbsOfTheReferenceAreThoseOfItsModel) {
  WriteTinyModel(folder_ / "other", /*seed=*/8);
  EngineOptions plain = Options(), with_reference = Options();
  plain.model = with_reference.reference_model = folder_ / "other";
  const auto other = Make(plain), engine = Make(with_reference);
  Step(*engine, TestRequest());
  const LogProbsRequest senior = {.prompt_token_ids = {3, 4}, .response_token_ids = {9, 17, 2}};
  LogProbsRequest reference = senior, shorter = senior;
  reference.reference = shorter.reference = true;
  shorter.response_token_ids = {9};
  const auto answers = engine->ComputeLogProbs({}, {{reference, senior, shorter}}).value();
  ASSERT_TRUE(answers.error.ok()) << answers.error;
  const std::vector<float> expected = LogProbsOf(*other, {3, 4}, {9, 17, 2});
  EXPECT_EQ(answers.results[0].logprobs, expected);
  EXPECT_EQ(answers.results[2].logprobs, std::vector<float>{expected[0]});
  EXPECT_EQ(answers.results[1].logprobs, LogProbsOf(*engine, {3, 4}, {9, 17, 2}));
  EXPECT_EQ(answers.results[0].weights, WeightsVersion());
  EXPECT_EQ(answers.results[1].weights.version, 1);
}

TEST_F(TrainerEngineTest, TheReferenceOfAdaptersIsTheModelWithoutThem) {
  EngineOptions options = Options();
  options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}};
  const auto engine = Make(options), base = Make();
  Step(*engine, TestRequest());
  const std::vector<int32_t> prompt = {3, 4}, response = {9, 17, 2};
  const auto answer = training::OnlyResult(engine->ComputeLogProbs(
      {}, {{{.prompt_token_ids = prompt, .response_token_ids = response, .reference = true}}}));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->logprobs, LogProbsOf(*base, prompt, response));
  EXPECT_NE(answer->logprobs, LogProbsOf(*engine, prompt, response));
}

TEST_F(TrainerEngineTest, ATrainerWithoutAReferenceRefusesToAskIt) {
  const absl::Status status =
      training::OnlyResult(
          Make()->ComputeLogProbs(
              {}, {{{.prompt_token_ids = {1}, .response_token_ids = {2}, .reference = true}}}))
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(FieldPath(status), "reference");
  EXPECT_EQ(Reason(status), "NO_REFERENCE_MODEL");
}

TEST_F(TrainerEngineTest, CheckpointContinuesBitForBitAndKeepsTheTable) {
  auto engine = Make();
  const StepResult first = Step(*engine, TestRequest());
  const checkpoint::Saved saved =
      engine
          ->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1", .keep = 2})
          .value();
  EXPECT_EQ(saved.path, folder_ / "checkpoints/step_1");
  EXPECT_GT(saved.bytes, 0);

  auto resumed = Make();
  ASSERT_TRUE(resumed->LoadCheckpoint({}, {saved.path}).ok());
  EXPECT_EQ(Digest(*resumed), Digest(*engine));
  EXPECT_EQ(resumed->Info().weights.version, 1);
  EXPECT_EQ(resumed->Info().optimizer_steps, 1);
  const StepResult repeat = Step(*resumed, TestRequest());
  EXPECT_TRUE(repeat.replayed);
  EXPECT_EQ(repeat.report.metrics, first.report.metrics);

  TrainStepRequest next = TestRequest();
  next.request_id = "request-2";
  next.expected_version = 1;
  std::get<PolicyBatch>(next.batch).objective.max_staleness = 1;
  EXPECT_EQ(Step(*resumed, next).report.metrics, Step(*engine, next).report.metrics);
  EXPECT_EQ(Digest(*resumed), Digest(*engine));
}

TEST_F(TrainerEngineTest, DamagedCheckpointIsRefusedAndChangesNothing) {
  auto engine = Make();
  Step(*engine, TestRequest());
  const std::string path =
      engine->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1"})
          .value()
          .path;
  std::filesystem::resize_file(path + "/optimizer.safetensors", 100);
  auto fresh = Make();
  const std::string before = Digest(*fresh);
  const absl::Status status = fresh->LoadCheckpoint({}, {path});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("optimizer.safetensors"));
  EXPECT_EQ(Digest(*fresh), before);
  EXPECT_EQ(fresh->LoadCheckpoint({}, {folder_ / "nowhere"}).code(), absl::StatusCode::kNotFound);
}

TEST_F(TrainerEngineTest, ExportIsAModelDirectory) {
  auto engine = Make();
  Step(*engine, TestRequest());
  const std::string path = folder_ / "export";
  ASSERT_TRUE(engine->ExportModel({}, path, DType::kFloat32).ok());
  EngineOptions options = Options();
  options.model = path;
  EXPECT_EQ(Digest(*Make(options)), Digest(*engine));
  EXPECT_EQ(engine->ExportModel({}, path, DType::kFloat32).code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(TrainerEngineTest, SnapshotIsAnImmutableCopyWithTheDigestOfTheWeights) {
  auto engine = Make();
  const auto snapshot = engine->Snapshot({}, {}).value();
  EXPECT_EQ(snapshot->manifest().digest, Digest(*engine));
  EXPECT_EQ(snapshot->manifest().version, 0);
  Step(*engine, TestRequest());
  std::vector<std::byte> bytes(static_cast<size_t>(snapshot->manifest().total_bytes));
  ASSERT_TRUE(snapshot->Read(0, absl::MakeSpan(bytes)).ok());
  EXPECT_EQ(StreamDigest(snapshot->manifest().tensors, bytes), snapshot->manifest().digest);
  const auto next = engine->Snapshot({}, {}).value();
  EXPECT_EQ(next->manifest().version, 1);
  EXPECT_EQ(next->manifest().digest, Digest(*engine));
}

TEST_F(TrainerEngineTest, SnapshotHasTheTypesThatReceiversWant) {
  auto engine = Make();
  const TensorTypes types = {{"model.embed_tokens.weight", DType::kBFloat16}};
  const auto narrow = engine->Snapshot({}, {.receivers = {types}}).value();
  EXPECT_EQ(narrow->manifest().tensors[0].dtype, DType::kBFloat16);
  EXPECT_EQ(narrow->manifest().tensors[1].dtype, DType::kFloat32);
  EXPECT_EQ(narrow->sums().size(), narrow->manifest().tensors.size());
  EXPECT_EQ(engine->Snapshot({}, {.receivers = {types}}).value(), narrow)
      << "while it is held, it is used again";
  const auto both = engine->Snapshot({}, {.receivers = {{}, types}}).value();
  EXPECT_NE(both, narrow);
  EXPECT_EQ(both->manifest().tensors.size(), narrow->manifest().tensors.size() + 1);
  EXPECT_EQ(both->manifest().digest, narrow->manifest().digest);

  const auto first_tensor = [](const WeightSource& source, at::ScalarType type) {
    const WeightSpec& spec = source.manifest().tensors[0];
    at::Tensor values = at::empty(spec.shape, type);
    auto* const bytes = static_cast<std::byte*>(values.mutable_data_ptr());
    EXPECT_TRUE(source.Read(0, {bytes, static_cast<size_t>(spec.bytes())}).ok());
    return values;
  };
  EXPECT_TRUE(at::equal(first_tensor(*narrow, at::kBFloat16),
                        first_tensor(*both, at::kFloat).to(at::kBFloat16)));
}

TEST_F(TrainerEngineTest, SupervisedStepsLearnTheResponses) {
  auto engine = Make();
  SupervisedBatch batch;
  batch.samples = {{.prompt_token_ids = {1, 5}, .response_token_ids = {9, 8, 7, 2}},
                   {.prompt_token_ids = {1, 6}, .response_token_ids = {4, 2}}};
  double expected = 0;
  for (const SupervisedSample& sample : batch.samples) {
    for (float logprob : LogProbsOf(*engine, sample.prompt_token_ids, sample.response_token_ids)) {
      expected -= logprob / 6;
    }
  }
  double loss = 0;
  for (int step = 0; step < 30; ++step) {
    TrainStepRequest request;
    request.run_id = "sft";
    request.request_id = std::to_string(step);
    request.expected_version = step;
    request.batch = batch;
    loss = Step(*engine, request).report.metrics["loss/total"];
    if (step == 0) {
      EXPECT_NEAR(loss, expected, 1e-5);
    }
  }
  EXPECT_LT(loss, 0.1 * expected);
}

// A batch with weights of both signs, and its request.
TrainStepRequest WeightedRequest(int64_t step = 0) {
  SupervisedBatch batch;
  batch.objective.aggregation = loss::Aggregation::kTokenSum;
  batch.samples = {{.prompt_token_ids = {1, 5},
                    .response_token_ids = {9, 8, 7, 2},
                    .weights = {0.5f, -1.5f, 0, 2}},
                   {.prompt_token_ids = {1, 6}, .response_token_ids = {4, 2}}};
  TrainStepRequest request;
  request.run_id = "weighted";
  request.step = step;
  request.request_id = std::to_string(step);
  request.expected_version = step;
  request.batch = batch;
  return request;
}

TEST_F(TrainerEngineTest, GradientOfWeightedTokensEqualsAutogradOverWholeLogits) {
  auto engine = Make();
  const TrainStepRequest request = WeightedRequest();
  const std::map<std::string, double> metrics = Step(*engine, request).report.metrics;
  const AutogradOracle oracle(folder_ / "model");
  at::Tensor loss = at::zeros({});
  for (const SupervisedSample& sample : std::get<SupervisedBatch>(request.batch).samples) {
    Trajectory text;
    text.prompt_token_ids = sample.prompt_token_ids;
    text.response_token_ids = sample.response_token_ids;
    const at::Tensor logprobs = oracle.LogProbs(text);
    loss = loss - (sample.weights.empty() ? logprobs : logprobs * at::tensor(sample.weights)).sum();
  }
  const double norm = oracle.GradientNorm(loss);
  EXPECT_NEAR(metrics.at("loss/total"), loss.item<double>(), 1e-5);
  EXPECT_NEAR(metrics.at("policy/grad_norm"), norm, 1e-5 * norm);
  EXPECT_EQ(metrics.at("policy/weighted_tokens"), 5);
}

TEST_F(TrainerEngineTest, AStepOfWeightsThatAreAllZeroIsAnUpdateWithoutAGradient) {
  auto engine = Make();
  const std::string before = Digest(*engine);
  TrainStepRequest request = WeightedRequest();
  for (SupervisedSample& sample : std::get<SupervisedBatch>(request.batch).samples) {
    sample.weights.assign(sample.response_token_ids.size(), 0);
  }
  const StepResult result = Step(*engine, request);
  EXPECT_FALSE(result.report.skipped);
  EXPECT_EQ(result.report.metrics.at("policy/grad_norm"), 0);
  EXPECT_EQ(engine->Info().optimizer_steps, 1);
  EXPECT_EQ(Digest(*engine), before);
}

TEST_F(TrainerEngineTest, AStepMayBringTheNumbersOfItsOptimizer) {
  EngineOptions others = Options();
  others.optimizer = {.learning_rate = 3e-3,
                      .beta1 = 0.5,
                      .beta2 = 0.6,
                      .epsilon = 1e-4,
                      .max_grad_norm = 0.25,
                      .weight_decay = 0.1};
  auto configured = Make(others), overridden = Make(), plain = Make();
  for (int step = 0; step < 3; ++step) {
    TrainStepRequest request = WeightedRequest(step);
    Step(*configured, request);
    Step(*plain, request);
    request.optimizer = {.learning_rate = 3e-3,
                         .beta1 = 0.5,
                         .beta2 = 0.6,
                         .epsilon = 1e-4,
                         .weight_decay = 0.1,
                         .max_grad_norm = 0.25};
    EXPECT_EQ(Step(*overridden, request).report.metrics.at("policy/learning_rate"), 3e-3);
  }
  EXPECT_EQ(Digest(*overridden), Digest(*configured));
  EXPECT_NE(Digest(*overridden), Digest(*plain));
}

TEST_F(TrainerEngineTest, GaeTrainsTheCriticOnTheReturns) {
  auto critic = std::make_shared<FakeCritic>();
  auto engine = Make(Options(), critic);
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  batch.objective.bootstrap_truncated = true;
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_EQ(metrics["critic/loss"], 1.5);
  EXPECT_EQ(critic->last.step.request_id, "request-1");
  EXPECT_EQ(critic->last.old_values[1], std::vector<float>(6, 0.25f));
  EXPECT_EQ(critic->last.returns[0], std::vector<float>(5, 0.0f));
  EXPECT_EQ(critic->last.returns[1], std::vector<float>(6, 1.5f));  // cut by length: + 0.5
}

TEST_F(TrainerEngineTest, AStepTellsHowLongItWaitedForTheCritic) {
  auto critic = std::make_shared<FakeCritic>();
  critic->delay = absl::Milliseconds(200);
  auto engine = Make(Options(), critic);
  PolicyBatch batch = TestBatch();
  EXPECT_EQ(Step(*engine, TestRequest(batch)).critic_seconds, 0);
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  TrainStepRequest request = TestRequest(batch);
  request.request_id = "second";
  request.expected_version = 1;
  const SteadyTime begun = SteadyTime::Now();
  const double seconds = Step(*engine, request).critic_seconds;
  EXPECT_GE(seconds, 0.4);  // values, and what it learns
  EXPECT_LT(seconds, absl::ToDoubleSeconds(SteadyTime::Now() - begun));
  const StepResult repeat = Step(*engine, request);
  EXPECT_TRUE(repeat.replayed);
  EXPECT_EQ(repeat.critic_seconds, 0);
}

TEST_F(TrainerEngineTest, TheCriticDoesNotLearnOnJuniorTokensThatGaeSkips) {
  auto critic = std::make_shared<FakeCritic>();
  auto engine = Make(Options(), critic);
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  Step(*engine, TestRequest(batch));
  EXPECT_TRUE(critic->last.loss_masks.empty());
  batch.objective.gae_skip_junior_tokens = true;
  TrainStepRequest request = TestRequest(batch);
  request.request_id = "second";
  request.expected_version = 1;
  Step(*engine, request);
  ASSERT_EQ(critic->last.loss_masks.size(), 4u);
  std::vector<uint8_t> mask;
  for (const Author author : batch.samples[1].trajectory.authorship_mask) {
    mask.push_back(author == Author::kSenior ? 1 : 0);
  }
  EXPECT_EQ(critic->last.loss_masks[1], mask);
  // Nor on what an environment said.
  batch.objective.gae_skip_junior_tokens = false;
  batch.samples[1].trajectory.authorship_mask[2] = Author::kEnvironment;
  request = TestRequest(batch);
  request.request_id = "third";
  request.expected_version = 2;
  Step(*engine, request);
  ASSERT_EQ(critic->last.loss_masks.size(), 4u);
  EXPECT_EQ(critic->last.loss_masks[1], (std::vector<uint8_t>{1, 1, 0, 1, 1, 1}));
}

// The critic's metrics are in the report where the critic has learnt.
TEST_F(TrainerEngineTest, AStepIsSkippedWithOrWithoutTheCritic) {
  auto critic = std::make_shared<FakeCritic>();
  auto engine = Make(Options(), critic);
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  critic->fail = NotFiniteError("the critic skipped the step");
  const StepResult first = Step(*engine, TestRequest(batch));
  EXPECT_TRUE(first.report.skipped);
  EXPECT_FALSE(first.report.metrics.contains("critic/loss"));
  critic->fail = absl::OkStatus();
  auto overflowing = Make(Overflowing(), critic);
  const StepResult second = Step(*overflowing, TestRequest(batch));
  EXPECT_TRUE(second.report.skipped);
  EXPECT_EQ(second.report.metrics.at("critic/loss"), 1.5);
}

TEST_F(TrainerEngineTest, FailingCriticFailsTheStepAndARetryApplies) {
  auto critic = std::make_shared<FakeCritic>();
  auto engine = Make(Options(), critic);
  PolicyBatch batch = TestBatch();
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  critic->fail = absl::UnavailableError("gone");
  EXPECT_EQ(engine->TrainStep({}, Stamped(*engine, TestRequest(batch))).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine->Info().weights.version, 0);
  // A critic that learnt this step from other values no longer has the values of the step.
  critic->fail = WithReason(absl::AlreadyExistsError("done"), reason::kRequestIdReused);
  EXPECT_EQ(Reason(engine->TrainStep({}, Stamped(*engine, TestRequest(batch))).status()),
            "REQUEST_ID_REUSED");
  EXPECT_EQ(engine->Info().weights.version, 0);
  critic->fail = absl::OkStatus();
  EXPECT_EQ(Step(*engine, TestRequest(batch)).report.weights.version, 1);
}

TEST_F(TrainerEngineTest, SentencesAreCountedOnlyWithATokenizer) {
  auto engine = Make();
  EXPECT_THAT(Step(*engine, TestRequest()).report.metrics,
              Not(Contains(Key("tandem/tokens_per_sent"))));
}

// A trainer, its reference and its junior each with another padding, all with one tokenizer.
TEST_F(TrainerEngineTest, PaddingRowsChangeNothing) {
  WriteTokenizer(folder_ / "model", 61);
  WriteTinyModel(folder_ / "junior", /*seed=*/4, {{"hidden_size", 24}});
  WriteTokenizer(folder_ / "junior", 61);
  WritePaddedModel(folder_ / "model", folder_ / "padded", 70);
  WritePaddedModel(folder_ / "junior", folder_ / "padded_junior", 64);
  EngineOptions plain = Options(), padded = Options();
  plain.reference_model = plain.model;
  plain.junior_model = folder_ / "junior";
  padded.model = padded.reference_model = folder_ / "padded";
  padded.junior_model = folder_ / "padded_junior";
  const auto a = Make(plain), b = Make(padded);
  EXPECT_EQ(b->Info().model.vocab_size, 70);
  EXPECT_EQ(b->Info().model.num_token_ids, 61);
  const std::vector<int32_t> prompt = {3, 4}, response = {60, 17, 9};
  EXPECT_EQ(LogProbsOf(*b, prompt, response), LogProbsOf(*a, prompt, response));
  EXPECT_EQ(FieldPath(b->ComputeLogProbs({}, {{{prompt, {60, 61}, 1}}})->error),
            "response_token_ids[1]");

  PolicyBatch batch = TestBatch();
  RecordLogProbs(*a, batch);
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  batch.objective.loss.entropy_coefficient = 0.1;
  batch.objective.loss.kl_estimator = loss::KlEstimator::kK3;
  batch.objective.loss.kl_coefficient = 0.1;
  batch.objective.junior_kl_coefficient = 0.5;
  for (int64_t step = 0; step < 3; ++step) {
    TrainStepRequest request = TestRequest(batch);
    request.request_id = request.payload_digest = std::to_string(step);
    request.step = step + 1;
    request.expected_version = step;
    const auto expected = Step(*a, request).report.metrics;
    const auto actual = Step(*b, request).report.metrics;
    ASSERT_EQ(actual.size(), expected.size());
    // The norm of the gradient is a sum in the order of memory, and so are the clipped updates.
    for (const auto& [name, value] : expected) {
      EXPECT_NEAR(actual.at(name), value, 1e-5 * std::max(1.0, std::abs(value))) << name;
    }
  }
}

TEST_F(TrainerEngineTest, ACheckpointOfAPaddedModelHasItsTokenizer) {
  WriteTokenizer(folder_ / "model", 61);
  WritePaddedModel(folder_ / "model", folder_ / "padded", 70);
  EngineOptions options = Options();
  options.model = folder_ / "padded";
  const auto engine = Make(options);
  const auto saved =
      engine->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_0"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  options.model = saved->path;
  EXPECT_EQ(Make(options)->Info().model.num_token_ids, 61);
  // Whoever loads a copy without it would count the padding rows in.
  std::filesystem::remove(folder_ / "padded/tokenizer.json");
  const absl::Status status =
      engine->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer.json is missing"));
}

TEST_F(TrainerEngineTest, AFrozenModelWithAnotherTokenizerIsRefused) {
  WriteTokenizer(folder_ / "model", 61);
  WriteTinyModel(folder_ / "other", /*seed=*/4);
  WriteTokenizer(folder_ / "other", 61, /*first=*/"x");
  for (const bool junior : {false, true}) {
    EngineOptions options = Options();
    (junior ? options.junior_model : options.reference_model) = folder_ / "other";
    const absl::Status status = CreateEngine(options, nullptr).status();
    EXPECT_EQ(Reason(status), "VOCABULARY_MISMATCH") << status;
    EXPECT_EQ(FieldPath(status), junior ? "junior_model" : "reference_model");
  }
}

TEST_F(TrainerEngineTest, BadOptionsAreNamed) {
  EngineOptions options = Options();
  options.micro_batch_tokens = 0;
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "micro_batch_tokens");
  options = Options();
  options.model = folder_ / "nowhere";
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "model");
}

}  // namespace
}  // namespace tandem::trainer
