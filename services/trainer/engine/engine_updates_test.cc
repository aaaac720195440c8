// Steps of several updates, with a reference or a junior model.
#include <gmock/gmock.h>

#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "common/base/errors/error.h"
#include "services/trainer/engine/testing/engine_fixture.h"

namespace tandem::trainer {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;

class EngineUpdatesTest : public TrainerEngineTest {
 protected:
  // Sets a number for every token. No two are equal, so that a mix-up shows.
  static void Provide(PolicyBatch& batch, std::vector<float> PolicySample::*numbers, float first) {
    float number = first;
    for (PolicySample& sample : batch.samples) {
      (sample.*numbers).clear();
      for (size_t t = 0; t < sample.trajectory.response_token_ids.size(); ++t) {
        (sample.*numbers).push_back(number);
        number = -1.1f * number + 0.01f;
        if (std::abs(number) > 3) number = first;
      }
    }
  }
  // Returns the samples [begin, end) as a batch of one update.
  static PolicyBatch SamplesOf(const PolicyBatch& batch, size_t begin, size_t end) {
    PolicyBatch samples{.objective = batch.objective, .samples = {}};
    samples.samples.assign(batch.samples.begin() + static_cast<int64_t>(begin),
                           batch.samples.begin() + static_cast<int64_t>(end));
    samples.objective.updates = {};
    return samples;
  }
  EngineOptions WithReference() const {
    EngineOptions options = Options();
    options.reference_model = folder_ / "other";
    WriteTinyModel(options.reference_model, /*seed=*/8);
    return options;
  }
  EngineOptions WithJunior(const std::string& family = "llama") const {
    EngineOptions options = Options();
    options.junior_model = folder_ / "other";
    WriteTinyModel(options.junior_model, /*seed=*/8, {{"hidden_size", 32}, {"head_dim", 8}},
                   family);
    return options;
  }
  // Returns a batch with the junior's own log-probs on the tokens that it wrote.
  PolicyBatch WrittenBy(const std::string& junior) const {
    PolicyBatch batch = TestBatch();
    EngineOptions options = Options();
    RecordLogProbs(*Make(options), batch);
    options.model = junior;
    auto model = Make(options);
    for (PolicySample& sample : batch.samples) {
      Trajectory& t = sample.trajectory;
      const std::vector<float> own =
          LogProbsOf(*model, t.prompt_token_ids, t.response_token_ids, t.sampling.temperature);
      for (size_t i = 0; i < own.size(); ++i) {
        if (!IsPolicy(t.authorship_mask[i])) t.author_logprobs[i] = own[i];
      }
    }
    return batch;
  }
};

// Each update of a step equals the update of a step with its mini-batch alone.
TEST_F(EngineUpdatesTest, MiniBatchesAndEpochsAreStepsOfTheirOwn) {
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  batch.objective.advantage_estimator = AdvantageEstimator::kProvided;
  batch.objective.max_staleness = 10;
  Provide(batch, &PolicySample::advantages, 0.5f);
  const std::vector<PolicyBatch> mini_batches = {SamplesOf(batch, 0, 1), SamplesOf(batch, 1, 2),
                                                 SamplesOf(batch, 2, 4)};
  batch.objective.updates = {.num_mini_batches = 3, .num_epochs = 2};
  const StepResult several = Step(*engine, TestRequest(batch));
  EXPECT_EQ(several.report.weights.version, 1);
  EXPECT_EQ(engine->Info().optimizer_steps, 6);
  EXPECT_EQ(several.report.metrics.at("policy/updates"), 6);
  EXPECT_EQ(several.report.metrics.at("policy/updates_not_finite"), 0);
  EXPECT_GT(several.report.metrics.at("policy/mean_ratio"), 0);
  EXPECT_NE(several.report.metrics.at("policy/mean_ratio"), 1);

  auto one_by_one = Make();
  const WeightsVersion start = one_by_one->Info().weights;
  std::map<std::string, double> mean;
  for (int64_t i = 0; i < 6; ++i) {
    PolicyBatch mini_batch = mini_batches[static_cast<size_t>(i % 3)];
    for (PolicySample& sample : mini_batch.samples) {
      for (VersionRun& run : sample.trajectory.senior_versions) run.weights = start;
    }
    TrainStepRequest request = TestRequest(mini_batch);
    request.request_id = request.payload_digest = std::to_string(i);
    request.step = i + 1;
    request.expected_version = i;
    for (const auto& [name, value] : Step(*one_by_one, request).report.metrics) {
      mean[name] += value / 6;
    }
  }
  EXPECT_EQ(Digest(*engine), Digest(*one_by_one));
  for (const char* name : {"loss/total", "loss/policy", "policy/grad_norm"}) {
    EXPECT_NEAR(several.report.metrics.at(name), mean[name], 1e-12) << name;
  }

  // A repeat gives the stored report.
  const StepResult repeat = Step(*engine, TestRequest(batch));
  EXPECT_TRUE(repeat.replayed);
  EXPECT_EQ(repeat.report, several.report);
}

TEST_F(EngineUpdatesTest, RecomputedLogProbsAreThoseBeforeTheFirstUpdate) {
  PolicyBatch batch = TestBatch();
  batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  auto engine = Make();
  const StepResult recomputed = Step(*engine, TestRequest(batch));
  EXPECT_NE(recomputed.report.metrics.at("policy/mean_ratio"), 1);

  auto other = Make();
  batch.objective.old_logprobs = OldLogprobs::kProvided;
  for (PolicySample& sample : batch.samples) {
    const Trajectory& t = sample.trajectory;
    sample.old_logprobs = LogProbsOf(*other, t.prompt_token_ids, t.response_token_ids);
  }
  const StepResult provided = Step(*other, TestRequest(batch));
  EXPECT_NEAR(recomputed.report.metrics.at("policy/ppo_kl"),
              provided.report.metrics.at("policy/ppo_kl"), 1e-6);
  EXPECT_NEAR(recomputed.report.metrics.at("policy/grad_norm"),
              provided.report.metrics.at("policy/grad_norm"), 1e-5);
}

// One mini-batch is the junior's alone and one is not finite; the other updates are made.
TEST_F(EngineUpdatesTest, UpdatesWithoutTokensOrFiniteNumbersAreLeftOut) {
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  batch.objective.updates.num_mini_batches = 4;
  Trajectory& first = batch.samples[0].trajectory;
  std::fill(first.authorship_mask.begin(), first.authorship_mask.end(), Author::kJunior);
  const StepResult result = Step(*engine, TestRequest(batch));
  EXPECT_EQ(result.report.metrics.at("policy/updates"), 3);
  EXPECT_EQ(result.report.metrics.at("policy/updates_not_finite"), 0);

  // One advantage of the second mini-batch is beyond float32.
  batch.objective.advantage_estimator = AdvantageEstimator::kProvided;
  Provide(batch, &PolicySample::advantages, 0.5f);
  for (float& advantage : batch.samples[1].advantages) advantage = 3e38f;
  auto other = Make();
  const StepResult partly = Step(*other, TestRequest(batch));
  EXPECT_FALSE(partly.not_finite);
  EXPECT_FALSE(partly.report.skipped);
  EXPECT_EQ(partly.report.metrics.at("policy/updates"), 2);
  EXPECT_EQ(partly.report.metrics.at("policy/updates_not_finite"), 1);
  EXPECT_EQ(partly.report.weights.version, 1);
  EXPECT_TRUE(std::isfinite(partly.report.metrics.at("policy/grad_norm")));
  EXPECT_TRUE(std::isfinite(partly.report.metrics.at("loss/total")));
  EXPECT_TRUE(Step(*other, TestRequest(batch)).replayed);

  for (PolicySample& sample : batch.samples) {
    sample.advantages.assign(sample.trajectory.response_token_ids.size(), 3e38f);
  }
  auto none = Make();
  const StepResult skipped = Step(*none, TestRequest(batch));
  EXPECT_TRUE(skipped.not_finite);
  EXPECT_TRUE(skipped.report.skipped);
  EXPECT_EQ(skipped.report.weights.version, 0);
  EXPECT_THAT(skipped.report.metrics, Not(Contains(Key("policy/updates"))));
}

// A step may have fewer samples than num_mini_batches.
TEST_F(EngineUpdatesTest, MoreMiniBatchesThanSamplesAreOneForEach) {
  PolicyBatch batch = TestBatch();
  auto engine = Make(), other = Make();
  RecordLogProbs(*engine, batch);
  batch.objective.updates.num_mini_batches = 5;
  EXPECT_EQ(Step(*engine, TestRequest(batch)).report.metrics.at("policy/updates"), 4);
  batch.objective.updates.num_mini_batches = 4;
  Step(*other, TestRequest(batch));
  EXPECT_EQ(Digest(*engine), Digest(*other));
}

TEST_F(EngineUpdatesTest, TheCriticIsAskedForTheSameUpdates) {
  const auto critic = std::make_shared<FakeCritic>();
  PolicyBatch batch = TestBatch();
  auto engine = Make(Options(), critic);
  RecordLogProbs(*engine, batch);
  batch.objective.advantage_estimator = AdvantageEstimator::kGae;
  batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 3};
  batch.objective.value_clip = 0.4;
  Step(*engine, TestRequest(batch));
  EXPECT_EQ(critic->last.updates, batch.objective.updates);
  EXPECT_EQ(critic->last.value_clip, 0.4);
}

// The mismatch does not contain what the step itself learns.
TEST_F(EngineUpdatesTest, TheMismatchIsThatBeforeTheFirstUpdate) {
  EngineOptions options = Options();
  options.optimizer.learning_rate = 0.01;
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*Make(options), batch);
  for (PolicySample& sample : batch.samples) {
    for (float& logprob : sample.trajectory.author_logprobs) logprob -= 0.1f;
  }
  batch.objective.junior_token_loss_weight = 0.5;
  const auto mismatch = [&](const PolicyBatch& of) {
    auto metrics = Step(*Make(options), TestRequest(of)).report.metrics;
    for (auto metric = metrics.begin(); metric != metrics.end();) {
      const bool kept = absl::StartsWith(metric->first, "mismatch/");
      metric = kept ? std::next(metric) : metrics.erase(metric);
    }
    return metrics;
  };
  for (const OldLogprobs old : {OldLogprobs::kSenior, OldLogprobs::kRecomputed}) {
    batch.objective.old_logprobs = old;
    batch.objective.updates = {};
    const auto one = mismatch(batch);
    EXPECT_NEAR(one.at("mismatch/k1"), -0.1, 1e-5);
    EXPECT_TRUE(one.contains("mismatch/junior/k1"));
    for (const int64_t num_epochs : {2, 4}) {
      batch.objective.updates = {.num_mini_batches = 1, .num_epochs = num_epochs};
      EXPECT_EQ(mismatch(batch), one) << num_epochs;
    }
    batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
    EXPECT_EQ(mismatch(batch), mismatch(SamplesOf(batch, 0, 2)));
  }
}

TEST_F(EngineUpdatesTest, ThereIsNoKlToAReferenceThatIsNotUsed) {
  auto engine = Make(WithReference());
  PolicyBatch batch = TestBatch();
  RecordLogProbs(*engine, batch);
  EXPECT_THAT(Step(*engine, TestRequest(batch)).report.metrics,
              Not(Contains(Key("policy/kl_to_ref"))));
}

TEST_F(EngineUpdatesTest, ProvidedReferenceLogProbsAreThoseOfTheModel) {
  PolicyBatch batch = TestBatch();
  const EngineOptions options = WithReference();
  auto engine = Make(options);
  RecordLogProbs(*engine, batch);
  batch.objective.loss.kl_coefficient = 0.5;
  batch.objective.loss.kl_estimator = loss::KlEstimator::kK3;
  auto of_model = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_GT(of_model["policy/kl_to_ref"], 0.01);

  EngineOptions plain = Options();
  plain.model = options.reference_model;
  auto reference = Make(plain);
  batch.objective.reference_logprobs = ReferenceLogprobs::kProvided;
  for (PolicySample& sample : batch.samples) {
    const Trajectory& t = sample.trajectory;
    sample.reference_logprobs = LogProbsOf(*reference, t.prompt_token_ids, t.response_token_ids);
  }
  auto other = Make();
  auto provided = Step(*other, TestRequest(batch)).report.metrics;
  for (const char* name : {"loss/kl", "policy/kl_to_ref", "policy/grad_norm"}) {
    EXPECT_NEAR(provided[name], of_model[name], 1e-6) << name;
  }
  batch.samples[1].reference_logprobs.clear();
  auto third = Make();
  EXPECT_EQ(FieldPath(third->TrainStep({}, Stamped(*third, TestRequest(batch))).status()),
            "samples[1].reference_logprobs");
}

// The reward is r - beta * KL, summed over the senior's tokens.
TEST_F(EngineUpdatesTest, AKlInTheRewardIsTakenFromIt) {
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  batch.objective.advantage_estimator = AdvantageEstimator::kLeaveOneOut;
  PolicyBatch by_hand = batch;
  batch.objective.kl_placement = KlPlacement::kReward;
  batch.objective.loss.kl_coefficient = 0.25;
  batch.objective.loss.kl_estimator = loss::KlEstimator::kK1;
  batch.objective.reference_logprobs = ReferenceLogprobs::kProvided;
  Provide(batch, &PolicySample::reference_logprobs, -0.6f);
  double taken = 0, kl = 0, tokens = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const PolicySample& sample = batch.samples[i];
    double own = 0;
    for (size_t t = 0; t < sample.reference_logprobs.size(); ++t) {
      if (!IsPolicy(sample.trajectory.authorship_mask[t])) continue;
      own += sample.trajectory.author_logprobs[t] - sample.reference_logprobs[t];
      ++tokens;
    }
    by_hand.samples[i].reward = *sample.reward - 0.25 * own;
    taken += 0.25 * own / 4;
    kl += own;
  }
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  auto other = Make();
  auto expected = Step(*other, TestRequest(by_hand)).report.metrics;
  EXPECT_NEAR(metrics["policy/grad_norm"], expected["policy/grad_norm"], 1e-6);
  EXPECT_NEAR(metrics["loss/total"], expected["loss/total"], 1e-6);
  EXPECT_EQ(metrics["loss/kl"], 0);
  EXPECT_NEAR(metrics["reward/kl_penalty"], taken, 1e-7);
  EXPECT_NEAR(metrics["policy/kl_to_ref"], kl / tokens, 1e-7);
  EXPECT_EQ(metrics["reward/mean"], 0.5);  // without the KL
}

// Rejected tokens have no loss, and a mean does not count them.
TEST_F(EngineUpdatesTest, RejectedTokensAreAsWithoutWeight) {
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  PolicyBatch by_hand = batch;
  double rejected = 0, weighted = 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    Trajectory& t = batch.samples[i].trajectory;
    for (size_t k = 0; k < t.author_logprobs.size(); ++k) {
      weighted += IsPolicy(t.authorship_mask[k]) ? 1 : 0;
      if (k % 2 == 1) continue;
      // The rollout gave the token e times the trainer's probability.
      rejected += IsPolicy(t.authorship_mask[k]) ? 1 : 0;
      t.author_logprobs[k] = std::min(0.0f, t.author_logprobs[k] + 1);
      by_hand.samples[i].trajectory.authorship_mask[k] = Author::kJunior;
    }
  }
  batch.objective.old_logprobs = by_hand.objective.old_logprobs = OldLogprobs::kRecomputed;
  batch.objective.rejection = {.upper = 2, .lower = 0.5};
  by_hand.objective.updates = batch.objective.updates = {.num_mini_batches = 2, .num_epochs = 2};
  auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
  auto other = Make();
  auto expected = Step(*other, TestRequest(by_hand)).report.metrics;
  EXPECT_EQ(Digest(*engine), Digest(*other));
  EXPECT_EQ(metrics["policy/grad_norm"], expected["policy/grad_norm"]);
  EXPECT_EQ(metrics["mismatch/rejected_fraction"], rejected / weighted);

  batch.objective.rejection = {.upper = 1e-3};
  const StepResult none = Step(*Make(), TestRequest(batch));
  EXPECT_TRUE(none.report.skipped);
  EXPECT_FALSE(none.not_finite);
  EXPECT_EQ(none.report.metrics.at("mismatch/rejected_fraction"), 1);
}

TEST_F(EngineUpdatesTest, ImportanceWeightsMayHaveTheMeanOne) {
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  for (PolicySample& sample : batch.samples) {
    for (float& x : sample.trajectory.author_logprobs) x -= 0.5f;  // every weight is exp(0.5)
  }
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  const double plain = Step(*engine, TestRequest(batch)).report.metrics.at("policy/grad_norm");
  batch.objective.loss.importance_sampling_cap = 5;
  auto weighted = Make(), normalised = Make();
  EXPECT_NEAR(Step(*weighted, TestRequest(batch)).report.metrics.at("policy/grad_norm"),
              std::exp(0.5) * plain, 1e-5);
  batch.objective.importance_sampling_batch_normalize = true;
  EXPECT_NEAR(Step(*normalised, TestRequest(batch)).report.metrics.at("policy/grad_norm"), plain,
              1e-5);
}

class JuniorKlTest : public EngineUpdatesTest,
                     public ::testing::WithParamInterface<std::pair<const char*, const char*>> {};

// Gemma 2 caps its logits: as the senior, and as the junior.
INSTANTIATE_TEST_SUITE_P(SeniorAndJunior, JuniorKlTest,
                         ::testing::Values(std::pair("llama", "llama"),
                                           std::pair("gemma2", "llama"),
                                           std::pair("llama", "gemma2")),
                         [](const auto& info) {
                           return std::string(info.param.first) + "_" + info.param.second;
                         });

// The two kinds over the vocabulary, beside a policy loss, and the sampled kind, whose gradient is
// the cross-entropy's.
TEST_P(JuniorKlTest, EqualsAutogradOverWholeLogits) {
  WriteTinyModel(folder_ / "model", /*seed=*/3, {}, GetParam().first);
  EngineOptions options = WithJunior(GetParam().second);
  options.micro_batch_tokens = 9;
  PolicyBatch batch = WrittenBy(options.junior_model);
  batch.objective.old_logprobs = OldLogprobs::kRecomputed;
  batch.objective.junior_kl_coefficient = 0.7;
  const AutogradOracle junior(options.junior_model);
  for (const TeacherDirection kind : {TeacherDirection::kReverse, TeacherDirection::kForward,
                                      TeacherDirection::kForwardSampled}) {
    batch.objective.junior_kl_kind = kind;
    const AutogradOracle oracle(folder_ / "model");
    at::Tensor policy = at::zeros({}), divergence = at::zeros({});
    double tokens = 0, junior_tokens = 0;
    for (const PolicySample& sample : batch.samples) {
      const Trajectory& t = sample.trajectory;
      std::vector<float> mask;
      for (const Author author : t.authorship_mask) mask.push_back(IsPolicy(author) ? 1 : 0);
      const at::Tensor wrote = 1 - at::tensor(mask);
      policy = policy - (oracle.LogProbs(t) * (1 - wrote)).sum() *
                            ((*sample.reward - 0.5) / (std::sqrt(0.5) + 1e-6));
      const at::Tensor p = at::log_softmax(oracle.Logits(t), -1);
      const at::Tensor q = at::log_softmax(junior.Logits(t), -1).detach();
      const at::Tensor kl = kind == TeacherDirection::kReverse ? (p.exp() * (p - q)).sum(-1)
                            : kind == TeacherDirection::kForward
                                ? (q.exp() * (q - p)).sum(-1)
                                : at::tensor(t.author_logprobs) - oracle.LogProbs(t);
      divergence = divergence + (kl * wrote).sum();
      tokens += (1 - wrote).sum().item<double>();
      junior_tokens += wrote.sum().item<double>();
    }
    const at::Tensor term = 0.7 * divergence / junior_tokens;
    const double norm = oracle.GradientNorm(policy / tokens + term);
    auto engine = Make(options);
    auto metrics = Step(*engine, TestRequest(batch)).report.metrics;
    EXPECT_NEAR(metrics["loss/junior_kl"], term.item<double>(), 1e-5);
    EXPECT_NEAR(metrics["policy/junior_kl"], term.item<double>() / 0.7, 1e-5);
    EXPECT_EQ(metrics["loss/total"], metrics["loss/policy"] + metrics["loss/junior_kl"]);
    EXPECT_NEAR(metrics["policy/grad_norm"], norm, 1e-5 * norm);
  }
}

TEST_F(EngineUpdatesTest, ABatchOfTheJuniorAloneLearnsFromItsKl) {
  const EngineOptions options = WithJunior();
  PolicyBatch batch = WrittenBy(options.junior_model);
  for (PolicySample& sample : batch.samples) {
    std::vector<Author>& mask = sample.trajectory.authorship_mask;
    std::fill(mask.begin(), mask.end(), Author::kJunior);
  }
  batch.objective.junior_kl_coefficient = 1;
  auto engine = Make(options);
  double last = 1e9;
  for (int64_t step = 0; step < 3; ++step) {
    TrainStepRequest request = TestRequest(batch);
    request.request_id = request.payload_digest = std::to_string(step);
    request.step = step + 1;
    request.expected_version = step;
    auto metrics = Step(*engine, request).report.metrics;
    EXPECT_LT(metrics["policy/junior_kl"], last);
    last = metrics["policy/junior_kl"];
    EXPECT_EQ(metrics["policy/weighted_tokens"], 0);
  }
  // Masked responses are left out of this term too.
  for (PolicySample& sample : batch.samples) {
    sample.trajectory.finish_reason = FinishReason::kLength;
  }
  batch.objective.mask_truncated_completions = true;
  EXPECT_TRUE(Step(*Make(options), TestRequest(batch)).report.skipped);
}

TEST_F(EngineUpdatesTest, WithTheSameModelTheJuniorKlIsNothing) {
  EngineOptions options = Options();
  options.junior_model = options.model;
  PolicyBatch batch = TestBatch();
  auto engine = Make();
  RecordLogProbs(*engine, batch);
  auto plain = Step(*engine, TestRequest(batch)).report.metrics;
  EXPECT_THAT(plain, Not(Contains(Key("policy/junior_kl"))));
  batch.objective.junior_kl_coefficient = 10;
  for (const TeacherDirection kind : {TeacherDirection::kReverse, TeacherDirection::kForward}) {
    batch.objective.junior_kl_kind = kind;
    auto other = Make(options);
    auto metrics = Step(*other, TestRequest(batch)).report.metrics;
    EXPECT_LT(std::abs(metrics["policy/junior_kl"]), 1e-6);
    EXPECT_NEAR(metrics["policy/grad_norm"], plain["policy/grad_norm"], 1e-5);
  }
}

// The base model is the junior of its adapters without a copy of its own, to the bit.
TEST_F(EngineUpdatesTest, AJuniorThatIsTheBaseModelHasTheMetricsOfACopy) {
  const std::string copy = folder_ / "copy";
  std::filesystem::copy(Options().model, copy);
  for (const auto format : {kernels::WeightFormat::kDense, kernels::WeightFormat::kInt8}) {
    std::vector<std::map<std::string, double>> reports;
    for (const std::string& junior : {Options().model, copy}) {
      EngineOptions options = Options();
      options.lora = {.rank = 4, .alpha = 8, .target_modules = {kAllLinear}, .seed = 4};
      options.weight_format = format;
      options.junior_model = junior;
      auto engine = Make(options);
      PolicyBatch batch = TestBatch();
      batch.objective.junior_kl_coefficient = 1;
      RecordLogProbs(*engine, batch);
      for (int64_t step = 0; step < 3; ++step) {
        TrainStepRequest request = TestRequest(batch);
        request.request_id = request.payload_digest = std::to_string(step);
        request.step = step + 1;
        request.expected_version = step;
        reports.push_back(Step(*engine, request).report.metrics);
      }
    }
    EXPECT_LT(std::abs(reports[0]["policy/junior_kl"]), 1e-6);
    EXPECT_GT(reports[2]["policy/junior_kl"], 1e-6);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(reports[i], reports[i + 3]);
  }
}

TEST_F(EngineUpdatesTest, AJuniorOfAnotherVocabularyIsRefused) {
  EngineOptions options = Options();
  options.junior_model = folder_ / "other";
  WriteTinyModel(options.junior_model, /*seed=*/8, {{"vocab_size", 67}});
  EXPECT_EQ(FieldPath(CreateEngine(options, nullptr).status()), "junior_model");
}

}  // namespace
}  // namespace tandem::trainer
