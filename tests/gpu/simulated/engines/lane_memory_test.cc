// The shares of a GPU's memory that lanes take, in a running engine.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/errors/error.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::rollout {
namespace {

using simulated_gpu::kMemoryBytes;

// Returns the bytes that are taken now, and the most that were.
auto TakenBytes() {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return simulated_gpu::DeviceMemory().getDeviceStats(0).allocated_bytes[kAll];
}

// Writes two models, and returns options of more sequences than fit: the caches fill the shares.
EngineOptions ManySequences(const std::string& folder) {
  WriteTinyModelAndTokenizer(folder + "/senior", 1);
  WriteTinyModelAndTokenizer(folder + "/junior", 2);
  EngineOptions options = TinyOptions(folder);
  options.compute.device = "cuda";
  options.max_num_seqs = 1 << 16;
  return options;
}

TEST(LaneMemoryTest, LanesStayWithinTheirSharesOfAGpu) {
  const TemporaryFolder folder;
  EngineOptions options = ManySequences(folder.path());
  options.junior.gpu_memory_utilization = 0.125;
  int64_t taken[2];
  for (const int i : {0, 1}) {
    options.senior.gpu_memory_utilization = i == 0 ? 0.125 : 0.1875;
    const int64_t before = TakenBytes().current;
    simulated_gpu::DeviceMemory().resetPeakStats(0);
    const auto engine = CreateEngine(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    taken[i] = TakenBytes().current - before;
    const Trajectory response = RunOne(**engine, RequestOf({.prob_senior = 0.5}));
    EXPECT_FALSE(response.response_token_ids.empty());
    EXPECT_LE(TakenBytes().peak - before, static_cast<int64_t>(kMemoryBytes / 16 * (4 + i)));
  }
  // The rest of the senior's share is its cache's, but for less than a block.
  EXPECT_NEAR(static_cast<double>(taken[1] - taken[0]), kMemoryBytes / 16.0, 1 << 16);
}

TEST(LaneMemoryTest, AShareWithoutRoomForASequenceIsRefused) {
  const TemporaryFolder folder;
  EngineOptions options = ManySequences(folder.path());
  options.senior.gpu_memory_utilization = 0.001;
  const absl::Status status = CreateEngine(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(FieldPath(status), "senior.gpu_memory_utilization") << status;
}

}  // namespace
}  // namespace tandem::rollout
