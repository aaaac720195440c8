// An engine on one GPU whose lanes have a stream each.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/errors/error.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/kernels.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::rollout {
namespace {

using simulated_gpu::TheCounts;

int64_t TakenBytes(c10::DeviceIndex device) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return simulated_gpu::DeviceMemory().getDeviceStats(device).allocated_bytes[kAll].current;
}

class GpuLanesTest : public testing::Test {
 protected:
  GpuLanesTest() {
    WriteTinyModelAndTokenizer(folder_.path() + "/senior", 1);
    WriteTinyModelAndTokenizer(folder_.path() + "/junior", 2);
  }

  EngineOptions Options(const std::string& device) {
    EngineOptions options = TinyOptions(folder_.path());
    options.compute.device = device;
    return options;
  }

  static std::unique_ptr<Engine> Create(const EngineOptions& options) {
    auto engine = CreateEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  // Returns responses to prompts whose authors change, one after the other.
  static std::vector<Trajectory> Responses(Engine& engine) {
    std::vector<PromptRequest> requests;
    for (int i = 0; i < 8; ++i) {
      requests.push_back(RequestOf({.prob_senior = 0.5}, /*seed=*/static_cast<uint64_t>(i)));
      requests.back().return_other_logprobs = i % 2 == 0;
      requests.back().sampling.max_tokens = 10;
    }
    std::vector<Trajectory> responses;
    for (const auto& listener : Submit(engine, requests)) {
      listener->Wait();
      EXPECT_EQ(listener->failure(), std::nullopt);
      responses.push_back(listener->finished().at(0));
    }
    // Those of the last pass are counted when it has ended.
    while (engine.Stats().sequences_running > 0) absl::SleepFor(absl::Milliseconds(1));
    return responses;
  }

  static void ExpectSame(const std::vector<Trajectory>& actual,
                         const std::vector<Trajectory>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i].response_token_ids, expected[i].response_token_ids) << i;
      EXPECT_EQ(actual[i].authorship_mask, expected[i].authorship_mask) << i;
      for (size_t t = 0; t < expected[i].author_logprobs.size(); ++t) {
        EXPECT_NEAR(actual[i].author_logprobs[t], expected[i].author_logprobs[t], 1e-4);
      }
    }
  }

  TemporaryFolder folder_;
};

// With the emulated kernels and with ATen's operations. The simulation ends the process where the
// streams of the lanes, the stream that loaded the models and the host are not ordered.
TEST_F(GpuLanesTest, PassesOfBothModelsRunAtTheSameTime) {
  const std::unique_ptr<Engine> cpu = Create(Options("cpu"));
  const std::vector<Trajectory> expected = Responses(*cpu);
  for (const bool with_kernels : {false, true}) {
    std::optional<simulated_gpu::WithKernels> kernels;
    if (with_kernels) kernels.emplace();
    const std::unique_ptr<Engine> gpu = Create(Options("cuda"));
    const std::vector<Trajectory> actual = Responses(*gpu);
    // Again, with the tables that the first passes have made.
    const int64_t waits = TheCounts().synchronizations, beside = TheCounts().beside;
    const int64_t passes = gpu->Stats().forward_passes_total;
    Responses(*gpu);
    EXPECT_EQ(TheCounts().synchronizations - waits, gpu->Stats().forward_passes_total - passes);
    EXPECT_GT(TheCounts().beside, beside);
    ExpectSame(actual, expected);
  }
}

// The simulation refuses operations and kernels on tensors of two devices. What the senior's device
// has is the senior's alone: the junior takes memory of its own device, and no more there than
// both.
TEST_F(GpuLanesTest, AJuniorOnADeviceOfItsOwnWritesTheSameTokens) {
  const std::unique_ptr<Engine> cpu = Create(Options("cpu"));
  const std::vector<Trajectory> expected = Responses(*cpu);
  for (const bool with_kernels : {false, true}) {
    std::optional<simulated_gpu::WithKernels> kernels;
    if (with_kernels) kernels.emplace();
    int64_t taken[2][2];  // by whether the junior has its own device, by device
    for (const bool apart : {false, true}) {
      const int64_t before[2] = {TakenBytes(0), TakenBytes(1)};
      EngineOptions options = Options("cuda");
      if (apart) options.layout.junior_gpu_devices = {1};
      const std::unique_ptr<Engine> gpu = Create(options);
      for (const int device : {0, 1}) taken[apart][device] = TakenBytes(device) - before[device];
      ExpectSame(Responses(*gpu), expected);
    }
    EXPECT_EQ(taken[false][1], 0);
    EXPECT_GT(taken[true][1], 0);
    EXPECT_EQ(taken[true][0] + taken[true][1], taken[false][0]);
  }
}

// A graph of a lane is replayed while the other lane computes.
TEST_F(GpuLanesTest, PassesOfBothModelsRunAsGraphs) {
  const simulated_gpu::WithKernels kernels;
  const std::vector<Trajectory> expected = Responses(*Create(Options("cuda")));
  for (const bool both : {false, true}) {
    EngineOptions options = Options("cuda");
    options.senior.enforce_eager = false;
    options.junior.enforce_eager = !both;
    const std::unique_ptr<Engine> gpu = Create(options);
    const int64_t before = TheCounts().replays;
    Responses(*gpu);
    const int64_t replays = TheCounts().replays, waits = TheCounts().synchronizations;
    const int64_t beside = TheCounts().beside, passes = gpu->Stats().forward_passes_total;
    EXPECT_GT(replays, before);
    const std::vector<Trajectory> actual = Responses(*gpu);
    EXPECT_GT(TheCounts().replays, replays);
    EXPECT_EQ(TheCounts().synchronizations - waits, gpu->Stats().forward_passes_total - passes);
    EXPECT_GT(TheCounts().beside, beside);
    ExpectSame(actual, expected);
  }
}

TEST_F(GpuLanesTest, GraphsThatCannotBeAreRefusedByTheirField) {
  const auto refused = [](const EngineOptions& options) {
    const absl::Status status = CreateEngine(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    return FieldPath(status);
  };
  EngineOptions options = Options("cuda");  // without kernels
  options.junior.enforce_eager = false;
  EXPECT_EQ(refused(options), "junior.enforce_eager");
  options = Options("cpu");
  options.senior.enforce_eager = false;
  EXPECT_EQ(refused(options), "senior.enforce_eager");
}

}  // namespace
}  // namespace tandem::rollout
