#include "services/critic/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "common/base/errors/error.h"
#include "common/model/testing/tiny_model_dir.h"
#include "services/training_core/service/testing/resolved_options.h"
#include "services/training_core/testing/only_result.h"

namespace tandem::critic {
namespace {

class CriticEngineTest : public ::testing::Test {
 protected:
  CriticEngineTest() { WriteTinyModel(folder_ / "model", /*seed=*/3); }

  EngineOptions Options() const {
    EngineOptions options;
    training::SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
    options.max_model_len = 64;
    options.value_head_seed = 5;
    options.optimizer.learning_rate = 1e-2;
    return options;
  }
  std::unique_ptr<Engine> Make(const EngineOptions& options) const {
    return std::move(CreateEngine(options)).value();
  }
  std::unique_ptr<Engine> Make() const { return Make(Options()); }

  static TrainStepRequest Request(Engine& engine, int64_t step = 0) {
    TrainStepRequest request;
    request.run_id = "run";
    request.step = step;
    request.request_id = std::to_string(step);
    request.payload_digest = "payload";
    request.expected_version = step;
    for (int i = 0; i < 3; ++i) {
      ValueSample sample;
      sample.prompt_token_ids = {1, 5 + i};
      for (int k = 0; k < 4 + i; ++k) sample.response_token_ids.push_back(3 + (7 * i + k) % 50);
      sample.old_values =
          Values(engine, {sample.prompt_token_ids, sample.response_token_ids}).values;
      sample.returns.assign(sample.response_token_ids.size(), static_cast<float>(i));
      request.samples.push_back(sample);
    }
    return request;
  }
  static ValuesResult Values(Engine& engine, const ValuesRequest& request) {
    return training::OnlyResult(engine.ComputeValues({}, {{request}})).value();
  }
  static StepResult Step(Engine& engine, const TrainStepRequest& request) {
    absl::StatusOr<StepResult> result = engine.TrainStep({}, request);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : StepResult{};
  }

  // Returns the engine's model, for autograd.
  std::unique_ptr<Model> LearningModel() const {
    return std::move(
               Model::Load(folder_ / "model",
                           {.head = HeadKind::kValue, .value_head_seed = 5, .requires_grad = true}))
        .value();
  }
  // Returns the values after every token of prompt and response, with autograd.
  static at::Tensor AllValues(Model& model, const ValueSample& sample) {
    std::vector<int64_t> ids(sample.prompt_token_ids.begin(), sample.prompt_token_ids.end());
    ids.insert(ids.end(), sample.response_token_ids.begin(), sample.response_token_ids.end());
    CausalContext context;
    return model.Values(model.HiddenStates(MakeRaggedBatch({ids}), context));
  }
  // Expects a step's loss, and the norm of its gradient by autograd.
  static void ExpectLossAndGradient(const StepReport& report, const at::Tensor& loss,
                                    const Model& model) {
    loss.backward();
    double squares = 0;
    for (const auto& [name, parameter] : model.Parameters()) {
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    EXPECT_NEAR(report.metrics.at("critic/loss"), loss.item<double>(), 1e-5);
    EXPECT_NEAR(report.metrics.at("critic/grad_norm"), std::sqrt(squares),
                1e-4 * std::sqrt(squares));
  }

  static std::string Digest(const Engine& engine) { return engine.Info().weights.digest; }

  TemporaryFolder folder_;
};

TEST_F(CriticEngineTest, ValueOfATokenComesFromTheStateBeforeIt) {
  auto engine = Make();
  const std::vector<int32_t> prompt = {1, 4, 9}, response = {8, 7, 6};
  const ValuesResult result = Values(*engine, {prompt, response});
  const auto model =
      std::move(Model::Load(folder_ / "model", {.head = HeadKind::kValue, .value_head_seed = 5}))
          .value();
  const at::NoGradGuard no_grad;
  CausalContext context;
  const at::Tensor values =
      model->Values(model->HiddenStates(MakeRaggedBatch({{1, 4, 9, 8, 7, 6}}), context));
  ASSERT_EQ(result.values.size(), 3u);
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_NEAR(result.values[static_cast<size_t>(t)], values[2 + t].item<float>(), 1e-5);
  }
  EXPECT_NEAR(result.final_value, values[5].item<float>(), 1e-5);
  EXPECT_FALSE(engine->value_head_from_checkpoint());
}

class CriticLearningTest : public CriticEngineTest,
                           public ::testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(Types, CriticLearningTest, ::testing::Values("float32", "bfloat16"));

TEST_P(CriticLearningTest, LearnsTheReturns) {
  EngineOptions options = Options();
  options.compute.dtype = GetParam();
  auto engine = Make(options);
  double first = 0, last = 0, explained = 0;
  for (int step = 0; step < 40; ++step) {
    TrainStepRequest request = Request(*engine, step);
    request.value_clip = 0;
    StepReport result = Step(*engine, request).report;
    EXPECT_EQ(result.weights.version, step + 1);
    last = result.metrics["critic/loss"];
    explained = result.metrics["critic/explained_variance"];
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.1 * first);
  EXPECT_GT(explained, 0.8);
}

TEST_F(CriticEngineTest, SharedPrefixesChangeNoValueAndLearnTheSame) {
  EngineOptions options = Options();
  options.optimizer.epsilon = 1e-5;
  const auto apart = Make(options);
  options.shared_prefixes = true;
  const auto sharing = Make(options);
  for (int64_t step = 0; step < 3; ++step) {
    TrainStepRequest request = Request(*apart, step);
    ValuesBatch batch;
    for (ValueSample& sample : request.samples) {
      sample.prompt_token_ids = {1, 5, 9, 30, 2};
      batch.requests.push_back({sample.prompt_token_ids, sample.response_token_ids});
    }
    const auto a = apart->ComputeValues({}, batch), b = sharing->ComputeValues({}, batch);
    ASSERT_TRUE(a.ok() && b.ok());
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      for (size_t t = 0; t < a->results[i].values.size(); ++t) {
        // Before the first update to the bit.
        EXPECT_NEAR(a->results[i].values[t], b->results[i].values[t], step == 0 ? 0 : 1e-4);
      }
      EXPECT_NEAR(a->results[i].final_value, b->results[i].final_value, step == 0 ? 0 : 1e-4);
    }
    const auto expected = Step(*apart, request).report.metrics,
               metrics = Step(*sharing, request).report.metrics;
    for (const char* name : {"critic/loss", "critic/grad_norm", "critic/explained_variance"}) {
      EXPECT_NEAR(metrics.at(name), expected.at(name), 1e-4 * std::abs(expected.at(name))) << name;
    }
  }
}

TEST_F(CriticEngineTest, LossAndGradientEqualAutograd) {
  auto engine = Make();
  TrainStepRequest request = Request(*engine);
  request.value_clip = 0;
  request.samples[1].loss_mask = {0, 1, 0, 1, 1};
  const StepReport report = Step(*engine, request).report;
  const std::unique_ptr<Model> model = LearningModel();
  at::Tensor loss = at::zeros({});
  int count = 0;
  for (const ValueSample& sample : request.samples) {
    const at::Tensor values = AllValues(*model, sample);
    for (size_t t = 0; t < sample.response_token_ids.size(); ++t) {
      if (!sample.loss_mask.empty() && sample.loss_mask[t] == 0) continue;
      loss = loss + 0.5 * (values[static_cast<int64_t>(t) + 1] - sample.returns[t]).square();
      ++count;
    }
  }
  loss = loss / count;
  ExpectLossAndGradient(report, loss, *model);
}

// A loss of two sequences' values after their last tokens, and of one in the middle.
TEST_F(CriticEngineTest, AStepOfDerivativesEqualsAutograd) {
  EngineOptions options = Options();
  options.micro_batch_tokens = 7;
  auto engine = Make(options);
  TrainStepRequest request = Request(*engine);
  std::vector<float> finals;
  for (ValueSample& sample : request.samples) {
    finals.push_back(
        Values(*engine, {sample.prompt_token_ids, sample.response_token_ids}).final_value);
    sample.old_values = sample.returns = {};
    sample.weights.assign(sample.response_token_ids.size() + 1, 0);
  }
  request.samples[0].weights.back() = -0.75f;
  request.samples[1].weights[2] = 0.5f;
  request.samples[2].weights.back() = 0.25f;
  const StepReport report = Step(*engine, request).report;
  const std::unique_ptr<Model> model = LearningModel();
  at::Tensor loss = at::zeros({});
  for (size_t i = 0; i < request.samples.size(); ++i) {
    const ValueSample& sample = request.samples[i];
    const at::Tensor values = AllValues(*model, sample);
    for (size_t t = 0; t < sample.weights.size(); ++t) {
      loss = loss + sample.weights[t] * values[static_cast<int64_t>(t) + 1];
    }
    EXPECT_NEAR(values[-1].item<float>(), finals[i], 1e-5);
  }
  ExpectLossAndGradient(report, loss, *model);
}

TEST_F(CriticEngineTest, AStepOfZeroDerivativesIsAnUpdate) {
  auto engine = Make();
  TrainStepRequest request = Request(*engine);
  for (ValueSample& sample : request.samples) {
    sample.old_values = sample.returns = {};
    sample.weights.assign(sample.response_token_ids.size() + 1, 0);
  }
  const StepReport report = Step(*engine, request).report;
  EXPECT_FALSE(report.skipped);
  EXPECT_EQ(report.weights.version, 1);
  EXPECT_EQ(report.metrics.at("critic/grad_norm"), 0);
}

TEST_F(CriticEngineTest, MicroBatchingDoesNotChangeTheStep) {
  EngineOptions small = Options();
  small.micro_batch_tokens = 7;
  auto a = Make(small), b = Make();
  auto x = Step(*a, Request(*a)).report.metrics, y = Step(*b, Request(*b)).report.metrics;
  for (const auto& [name, value] : y) EXPECT_NEAR(x[name], value, 1e-4) << name;
}

// A step with ATen kernels, which a GPU runs, has the results of one with the CPU's kernels, in
// both types.
TEST_F(CriticEngineTest, TheOtherKernelsAndTypesTakeTheSameStep) {
  const TrainStepRequest request = Request(*Make());
  const auto step_with = [&](const std::string& dtype, const std::string& kernels) {
    EngineOptions options = Options();
    options.compute.dtype = dtype;
    options.compute.kernels = kernels;
    return Step(*Make(options), request).report.metrics;
  };
  auto expected = step_with("float32", "auto");
  auto aten = step_with("float32", "aten");
  auto bfloat16 = step_with("bfloat16", "auto");
  for (const char* name : {"critic/loss", "critic/grad_norm"}) {
    const double scale = std::abs(expected[name]);
    EXPECT_NEAR(aten[name], expected[name], 1e-6 * scale) << name;
    EXPECT_NEAR(bfloat16[name], expected[name], 0.01 * scale) << name;
    EXPECT_NE(bfloat16[name], expected[name]) << name;
  }
}

// Each update of a step equals the update of a step with its mini-batch alone.
TEST_F(CriticEngineTest, MiniBatchesAndEpochsAreStepsOfTheirOwn) {
  auto engine = Make();
  TrainStepRequest request = Request(*engine);
  request.updates = {.num_mini_batches = 2, .num_epochs = 2};
  const StepResult several = Step(*engine, request);
  EXPECT_EQ(several.report.weights.version, 1);
  EXPECT_EQ(several.report.metrics.at("critic/updates"), 4);

  auto one_by_one = Make();
  double loss = 0;
  for (int64_t i = 0; i < 4; ++i) {
    TrainStepRequest alone = request;
    alone.updates = {};
    alone.step = alone.expected_version = i;
    alone.request_id = std::to_string(i);
    const auto first = request.samples.begin(), last = request.samples.end();
    alone.samples.assign(i % 2 == 0 ? first : first + 1, i % 2 == 0 ? first + 1 : last);
    loss += Step(*one_by_one, alone).report.metrics.at("critic/loss") / 4;
  }
  EXPECT_EQ(Digest(*engine), Digest(*one_by_one));
  EXPECT_NEAR(several.report.metrics.at("critic/loss"), loss, 1e-12);
}

TEST_F(CriticEngineTest, AGradientThatIsNotFiniteSkipsTheStep) {
  auto engine = Make();
  const std::string before = Digest(*engine);
  TrainStepRequest request = Request(*engine);
  request.value_clip = 0;
  for (ValueSample& sample : request.samples) {
    for (float& target : sample.returns) target = 3e38f;
  }
  const StepResult result = Step(*engine, request);
  EXPECT_TRUE(result.report.skipped);
  EXPECT_TRUE(result.not_finite);
  EXPECT_EQ(result.report.weights.version, 0);
  EXPECT_EQ(Digest(*engine), before);
}

TEST_F(CriticEngineTest, RepeatIsAnsweredFromTheTableAndStaleIsRefused) {
  auto engine = Make();
  TrainStepRequest request = Request(*engine);
  const StepResult first = Step(*engine, request);
  const StepResult second = Step(*engine, request);
  EXPECT_FALSE(first.replayed);
  EXPECT_TRUE(second.replayed);
  EXPECT_EQ(second.report.metrics, first.report.metrics);
  request.payload_digest = "other";
  EXPECT_EQ(Reason(engine->TrainStep({}, request).status()), "REQUEST_ID_REUSED");
  request.request_id = "new";
  EXPECT_EQ(Reason(engine->TrainStep({}, request).status()), "STALE_POLICY_VERSION");
}

TEST_F(CriticEngineTest, CheckpointContinuesBitForBit) {
  auto engine = Make();
  const TrainStepRequest request = Request(*engine);
  Step(*engine, request);
  const std::string path =
      engine
          ->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1", .keep = 1})
          .value()
          .path;
  auto resumed = Make();
  ASSERT_TRUE(resumed->LoadCheckpoint({}, {path}).ok());
  EXPECT_EQ(Digest(*resumed), Digest(*engine));
  EXPECT_TRUE(Step(*resumed, request).replayed);
  const TrainStepRequest next = Request(*engine, 1);
  EXPECT_EQ(Step(*resumed, next).report.metrics, Step(*engine, next).report.metrics);
  EXPECT_EQ(Digest(*resumed), Digest(*engine));
}

// Sequences of one micro-batch, of several, and alone have the same values to the bit.
TEST_F(CriticEngineTest, SequencesAreEvaluatedTogetherAsAlone) {
  auto engine = Make();
  ValuesBatch batch;
  for (int i = 0; i < 7; ++i) {
    ValuesRequest request = {{1, 5 + i}, {}};
    for (int k = 0; k < 1 + 3 * i; ++k) request.response_token_ids.push_back(3 + (7 * i + k) % 50);
    if (i % 2 == 1) {
      request.run_id = "run";
      request.request_id = "step";
    }
    batch.requests.push_back(request);
  }
  const auto together = engine->ComputeValues({}, batch);
  ASSERT_TRUE(together.ok() && together->error.ok()) << together.status();
  ASSERT_EQ(together->results.size(), 7u);
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    const ValuesResult alone =
        Values(*engine, {batch.requests[i].prompt_token_ids, batch.requests[i].response_token_ids});
    EXPECT_EQ(together->results[i].values, alone.values) << i;
    EXPECT_EQ(together->results[i].final_value, alone.final_value) << i;
    EXPECT_EQ(together->results[i].weights, alone.weights) << i;
  }
  // Those of a step are kept, and a repeat may ask for others beside them.
  Step(*engine, Request(*engine));
  batch.requests.insert(batch.requests.begin(), {{1, 2}, {3}});
  const auto again = engine->ComputeValues({}, batch);
  ASSERT_TRUE(again.ok() && again->error.ok()) << again.status();
  EXPECT_NE(again->results[1].values, together->results[0].values);
}

TEST_F(CriticEngineTest, ABatchIsAnsweredUpToTheRequestThatIsRefused) {
  auto engine = Make();
  const auto answers =
      engine->ComputeValues({}, {{{{1}, {2, 3}}, {{1}, {4}}, {{1}, {1'000'000}}, {{1}, {5}}}});
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(FieldPath(answers->error), "response_token_ids[0]");
  ASSERT_EQ(answers->results.size(), 2u);
  EXPECT_EQ(answers->results[0].values.size(), 2u);
  EXPECT_EQ(answers->results[1].values, Values(*engine, {{1}, {4}}).values);
}

// A PPO step whose trainer failed after the critic learnt it is repeated with the same values.
TEST_F(CriticEngineTest, ALearntStepGetsItsValuesAgain) {
  auto engine = Make();
  TrainStepRequest step = Request(*engine);
  const auto values = [&](Engine& critic, const std::string& request_id) {
    return Values(critic, {step.samples[0].prompt_token_ids, step.samples[0].response_token_ids,
                           step.run_id, request_id});
  };
  const ValuesResult before = values(*engine, step.request_id);
  Step(*engine, step);
  const ValuesResult again = values(*engine, step.request_id);
  EXPECT_EQ(again.values, before.values);
  EXPECT_EQ(again.final_value, before.final_value);
  EXPECT_EQ(again.weights, before.weights);
  EXPECT_TRUE(Step(*engine, step).replayed);
  EXPECT_NE(values(*engine, "another").values, before.values);

  const std::string path =
      engine
          ->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1", .keep = 1})
          .value()
          .path;
  auto resumed = Make();
  ASSERT_TRUE(resumed->LoadCheckpoint({}, {path}).ok());
  EXPECT_EQ(values(*resumed, step.request_id).values, before.values);
  EXPECT_EQ(values(*resumed, step.request_id).weights, before.weights);
}

TEST_F(CriticEngineTest, ValuesOfAStepThatWasNotLearntFollowTheWeights) {
  auto engine = Make();
  const TrainStepRequest step = Request(*engine);
  const ValuesRequest question = {step.samples[0].prompt_token_ids,
                                  step.samples[0].response_token_ids, "run", "later"};
  const ValuesResult before = Values(*engine, question);
  Step(*engine, step);
  const ValuesResult after = Values(*engine, question);
  EXPECT_EQ(after.weights, engine->Info().weights);
  EXPECT_NE(after.values, before.values);
}

TEST_F(CriticEngineTest, TheBaseModelHasItsValueHeadAgainAndKeepsNoValues) {
  auto engine = Make();
  const TrainStepRequest step = Request(*engine);
  const ValuesRequest question = {step.samples[0].prompt_token_ids,
                                  step.samples[0].response_token_ids, step.run_id, step.request_id};
  const ValuesResult before = Values(*engine, question);
  const StepReport first = Step(*engine, step).report;
  Step(*engine, Request(*engine, 1));
  ASSERT_TRUE(engine->LoadBaseModel({}).ok());
  EXPECT_FALSE(engine->unsaved());
  EXPECT_EQ(engine->Info().weights, before.weights);
  EXPECT_EQ(Values(*engine, question).values, before.values);
  const StepResult again = Step(*engine, step);
  EXPECT_FALSE(again.replayed);
  EXPECT_EQ(again.report, first);
}

TEST_F(CriticEngineTest, ExportHoldsTheValueHead) {
  auto engine = Make();
  Step(*engine, Request(*engine));
  ASSERT_TRUE(engine->ExportModel({}, folder_ / "export", DType::kFloat32).ok());
  EngineOptions options = Options();
  options.model = folder_ / "export";
  options.value_head_seed = 99;
  auto loaded = Make(options);
  EXPECT_TRUE(loaded->value_head_from_checkpoint());
  EXPECT_EQ(Digest(*loaded), Digest(*engine));
}

TEST_F(CriticEngineTest, TiedModelNeedsAnExplicitChoice) {
  WriteTinyModel(folder_ / "tied", 3, {{"tie_word_embeddings", true}});
  EngineOptions options = Options();
  options.model = folder_ / "tied";
  EXPECT_EQ(CreateEngine(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.untie_embeddings = true;
  EXPECT_TRUE(CreateEngine(options).ok());
}

}  // namespace
}  // namespace tandem::critic
