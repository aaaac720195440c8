// A multi-rank critic has the results of a single process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/ranks/testing/rank_processes.h"
#include "services/critic/engine/engine.h"
#include "services/training_core/service/testing/resolved_options.h"
#include "services/training_core/testing/only_result.h"

namespace tandem::critic {
namespace {

// Relative, in float32: the old values differ in their last bits, which Adam carries on.
constexpr double kTolerance = 1e-4;

struct Layout {
  const char* name;
  parallel::StrategyOptions strategy;

  friend void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }
};

class CriticRanksTest : public ::testing::TestWithParam<Layout> {
 protected:
  // Sizes that two ranks can shard.
  CriticRanksTest() { WriteTinyModel(folder_ / "model", /*seed=*/3, {{"intermediate_size", 44}}); }

  EngineOptions Options() const {
    EngineOptions options;
    training::SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
    options.max_model_len = 64;
    options.micro_batch_tokens = 8;
    options.value_head_seed = 5;
    // Larger steps amplify differences in the last bits.
    options.optimizer.learning_rate = 1e-3;
    options.optimizer.epsilon = 1e-5;
    return options;
  }

  EngineOptions RankOptions(const RankEnvironment& environment) const {
    EngineOptions options = Options();
    options.environment = environment;
    options.strategy = GetParam().strategy;
    options.strategy.megatron.use_distributed_optimizer = true;
    return options;
  }

  // Expects the metrics of a step to be those of one process.
  static void ExpectSameMetrics(const absl::StatusOr<StepResult>& step,
                                const absl::StatusOr<StepResult>& of_one) {
    ASSERT_TRUE(step.ok()) << step.status();
    ASSERT_TRUE(of_one.ok()) << of_one.status();
    for (const auto& [name, value] : of_one->report.metrics) {
      EXPECT_NEAR(step->report.metrics.at(name), value,
                  kTolerance * std::max(std::abs(value), 1e-1))
          << name;
    }
  }

  static ValuesResult Values(Engine& engine, const ValuesRequest& request) {
    absl::StatusOr<ValuesResult> result =
        training::OnlyResult(engine.ComputeValues({}, {{request}}));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : ValuesResult{};
  }

  static TrainStepRequest Request(Engine& engine, int64_t step) {
    TrainStepRequest request;
    request.run_id = "run";
    request.step = step;
    request.request_id = request.payload_digest = std::to_string(step);
    request.expected_version = step;
    for (int i = 0; i < 5; ++i) {
      ValueSample sample;
      sample.prompt_token_ids = {1, 5 + i};
      for (int k = 0; k < 4 + i; ++k) sample.response_token_ids.push_back(3 + (7 * i + k) % 50);
      sample.old_values = Values(engine, {sample.prompt_token_ids, sample.response_token_ids,
                                          request.run_id, request.request_id})
                              .values;
      sample.returns.assign(sample.response_token_ids.size(), static_cast<float>(i) / 2);
      request.samples.push_back(sample);
    }
    return request;
  }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, CriticRanksTest,
    ::testing::Values(
        Layout{"zero_1", {.name = "zero", .zero = parallel::ZeroOfStage(1)}},
        Layout{"zero_3", {.name = "zero", .zero = parallel::ZeroOfStage(3)}},
        Layout{"tensor_2", {.name = "megatron", .megatron = {.tensor_model_parallel_size = 2}}},
        Layout{"pipeline_2", {.name = "megatron", .megatron = {.pipeline_model_parallel_size = 2}}},
        Layout{"context_2", {.name = "megatron", .megatron = {.context_parallel_size = 2}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(CriticRanksTest, StepsOfDerivativesAreThoseOfOneProcess) {
  ranks::RunOnRanks(2, [&](const RankEnvironment& environment) {
    const auto engine = CreateEngine(RankOptions(environment)).value();
    if (environment.rank == 0) {
      const auto single = CreateEngine(Options()).value();
      for (int64_t step = 0; step < 3; ++step) {
        TrainStepRequest request = Request(*single, step);
        for (size_t i = 0; i < request.samples.size(); ++i) {
          ValueSample& sample = request.samples[i];
          sample.old_values = sample.returns = {};
          sample.weights.assign(sample.response_token_ids.size() + 1, 0);
          sample.weights.back() = i % 2 == 0 ? -0.25f : 0.375f;
        }
        const auto a = engine->TrainStep({}, request), b = single->TrainStep({}, request);
        ASSERT_NO_FATAL_FAILURE(ExpectSameMetrics(a, b));
      }
    }
    engine->Shutdown();
    EXPECT_EQ(engine->Info().weights.version, 3);
  });
}

TEST_P(CriticRanksTest, ValuesAndStepsAreThoseOfOneProcess) {
  ranks::RunOnRanks(2, [&](const RankEnvironment& environment) {
    const auto engine = CreateEngine(RankOptions(environment)).value();
    if (environment.rank == 0) {
      const auto single = CreateEngine(Options()).value();
      EXPECT_FALSE(engine->value_head_from_checkpoint());
      for (int64_t step = 0; step < 3; ++step) {
        const TrainStepRequest request = Request(*engine, step), alone = Request(*single, step);
        for (size_t i = 0; i < request.samples.size(); ++i) {
          const auto &a = request.samples[i].old_values, &b = alone.samples[i].old_values;
          for (size_t t = 0; t < b.size(); ++t) EXPECT_NEAR(a[t], b[t], 1e-4);
        }
        const auto a = engine->TrainStep({}, request), b = single->TrainStep({}, alone);
        ASSERT_NO_FATAL_FAILURE(ExpectSameMetrics(a, b));
        // Every rank has the values that were kept for the step.
        EXPECT_EQ(Request(*engine, step), request);
      }
    }
    engine->Shutdown();
    EXPECT_EQ(engine->Info().weights.version, 3);
  });
}

}  // namespace
}  // namespace tandem::critic
