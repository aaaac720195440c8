// Steps of the trainer on a simulated GPU: the numbers of the CPU, and how often the host waits.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "services/trainer/engine/testing/engine_fixture.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/kernels.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::trainer {
namespace {

using simulated_gpu::TheCounts;

class SimulatedTrainerTest : public TrainerEngineTest {
 protected:
  EngineOptions OnGpu(const std::string& dtype) const {
    EngineOptions options = Options();
    options.compute.device = "cuda";
    options.compute.dtype = dtype;
    return options;
  }
};

// `count` samples of the test batch, over and over.
PolicyBatch Samples(int count) {
  const PolicyBatch batch = TestBatch();
  PolicyBatch many = batch;
  many.samples.clear();
  for (int i = 0; i < count; ++i) many.samples.push_back(batch.samples[i % batch.samples.size()]);
  return many;
}

// With the emulated kernels and with ATen's operations.
TEST_F(SimulatedTrainerTest, AStepHasTheMetricsOfTheCpu) {
  const std::unique_ptr<Engine> cpu = Make();
  const StepResult expected = Step(*cpu, TestRequest());
  for (const bool with_kernels : {false, true}) {
    std::optional<simulated_gpu::WithKernels> kernels;
    if (with_kernels) kernels.emplace();
    const std::unique_ptr<Engine> gpu = Make(OnGpu("float32"));
    const StepResult actual = Step(*gpu, TestRequest());
    for (const char* name :
         {"policy/grad_norm", "policy/entropy", "policy/ppo_kl", "policy/mean_ratio"}) {
      ASSERT_TRUE(expected.report.metrics.contains(name)) << name;
      EXPECT_NEAR(actual.report.metrics.at(name), expected.report.metrics.at(name),
                  2e-5 * (1 + std::abs(expected.report.metrics.at(name))))
          << name << (with_kernels ? " with kernels" : "");
    }
    const std::vector<int32_t> prompt = {1, 5, 7}, response = {3, 10, 17};
    const std::vector<float> own = LogProbsOf(*gpu, prompt, response);
    const std::vector<float> those_of_cpu = LogProbsOf(*cpu, prompt, response);
    for (size_t i = 0; i < own.size(); ++i) EXPECT_NEAR(own[i], those_of_cpu[i], 1e-4);
  }
}

// Once for the log-probs of each micro-batch, which decide the losses of its tokens; for the norm
// of the gradient; for the digest of the new weights; with experts for the losses of their routers.
TEST_F(SimulatedTrainerTest, TheHostWaitsOnceForAMicroBatch) {
  const auto expect_waits = [&](EngineOptions options, int64_t of_step) {
    for (const auto& [count, micro_batches] : {std::pair{4, 1}, {40, 1}, {40, 3}}) {
      options.micro_batch_tokens = micro_batches == 1 ? 1 << 20 : 140;
      const std::unique_ptr<Engine> engine = Make(options);
      const TrainStepRequest request = TestRequest(Samples(count));
      const int64_t before = TheCounts().synchronizations;
      EXPECT_EQ(Step(*engine, request).report.metrics.at("policy/micro_batches"), micro_batches);
      EXPECT_EQ(TheCounts().synchronizations - before, micro_batches + of_step)
          << options.model << " " << count;
    }
  };
  expect_waits(OnGpu("bfloat16"), 2);
  const simulated_gpu::WithKernels kernels;
  EngineOptions experts = OnGpu("bfloat16");
  experts.model = folder_ / "experts";
  WriteTinyModel(experts.model, /*seed=*/3, nlohmann::json::object(), "qwen3_moe");
  expect_waits(experts, 3);
}

// The limit rises until a step has what it needs, so that one allocation after another fails. A
// step that has failed changes nothing, and is done when it is asked for again.
TEST_F(SimulatedTrainerTest, AStepWithoutMemoryFailsAndTheNextOneHasItsBits) {
  const simulated_gpu::WithKernels kernels;
  const absl::Cleanup all_of_it = [] { simulated_gpu::SetMemoryLimit(0, 0); };
  const std::unique_ptr<Engine> undisturbed = Make(OnGpu("bfloat16"));
  const std::unique_ptr<Engine> engine = Make(OnGpu("bfloat16"));
  const std::string before = Digest(*engine);
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto taken = [] {
    return static_cast<size_t>(
        simulated_gpu::DeviceMemory().getDeviceStats(0).allocated_bytes[kAll].current);
  };
  const size_t at_first = taken();
  int failures = 0;
  for (size_t more = 512; more < (size_t{1} << 24); more *= 2) {
    simulated_gpu::SetMemoryLimit(0, at_first + more);
    const auto result = engine->TrainStep({}, Stamped(*engine, TestRequest()));
    simulated_gpu::SetMemoryLimit(0, 0);
    if (result.ok()) break;
    ++failures;
    EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                testing::AllOf(testing::HasSubstr("the GPU's memory"),
                               testing::HasSubstr("batch.micro_batch_tokens")));
    EXPECT_EQ(Digest(*engine), before) << more;
  }
  EXPECT_GE(failures, 3);
  EXPECT_NE(Digest(*engine), before);
  const size_t own = taken() - at_first;  // tables and the like
  Step(*undisturbed, TestRequest());
  EXPECT_EQ(Digest(*engine), Digest(*undisturbed));
  EXPECT_EQ(taken() - at_first, 2 * own);
}

}  // namespace
}  // namespace tandem::trainer
