// Calls of an engine when another process has taken the rest of the GPU's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/testing/engine_calls.h"
#include "services/rollout/engine/testing/requests.h"
#include "services/rollout/engine/testing/tiny_options.h"
#include "services/rollout/engine/testing/tiny_tokenizer.h"
#include "tests/gpu/simulated/kernels.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::rollout {
namespace {

using testing::HasSubstr;

size_t TakenBytes() {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<size_t>(
      simulated_gpu::DeviceMemory().getDeviceStats(0).allocated_bytes[kAll].current);
}

void ExpectOutOfMemory(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the GPU's memory"));
  for (const char* setting : {"kv_cache_bytes", "max_num_seqs", "max_batched_tokens"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(setting));
  }
}

// The limit rises until the calls have what they need, so that one allocation after another fails.
// A call that fails leaves nothing behind: no memory is taken, and the next calls have the same
// bits.
TEST(OutOfMemoryTest, ACallFailsAndTheNextOneHasItsBits) {
  const TemporaryFolder folder;
  WriteTinyModelAndTokenizer(folder.path() + "/senior", 1);
  WriteTinyModelAndTokenizer(folder.path() + "/junior", 2);
  EngineOptions options = TinyOptions(folder.path());
  options.compute.device = "cuda";
  const simulated_gpu::WithKernels kernels;
  const absl::Cleanup all_of_it = [] { simulated_gpu::SetMemoryLimit(0, 0); };
  const auto engine = CreateEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  PromptRequest request = RequestOf({.prob_senior = 0.5});
  request.return_other_logprobs = true;
  request.sampling.max_tokens = 6;
  const ScoreRequest texts = {
      .sequences = {{.token_ids = {3, 9, 21, 40, 8}, .first_scored_token = 2}}};
  const auto run = [&] { return Submit(**engine, {request})[0]; };
  const auto finished = [&] {
    const auto listener = run();
    listener->Wait();
    EXPECT_EQ(listener->failure(), std::nullopt);
    return listener->finished().at(0);
  };
  finished();  // makes tables
  const Trajectory expected = finished();
  const auto expected_score = Score(**engine, texts);
  ASSERT_TRUE(expected_score.ok()) << expected_score.status();
  const size_t taken = TakenBytes();
  constexpr size_t kLeast = 512;
  int failures = 0;
  bool ran = false;
  for (size_t more = kLeast; !ran; more *= 2) {
    ASSERT_LT(more, size_t{1} << 24);
    simulated_gpu::SetMemoryLimit(0, taken + more);
    const auto listener = run();
    listener->Wait();
    const auto score = Score(**engine, texts);
    simulated_gpu::SetMemoryLimit(0, 0);
    ran = listener->failure() == std::nullopt;
    failures += ran ? 0 : 1;
    if (!ran) ExpectOutOfMemory(*listener->failure());
    if (!score.ok()) ExpectOutOfMemory(score.status());
    if (more == kLeast) {
      EXPECT_FALSE(score.ok());
    }
    const Trajectory next = finished();
    EXPECT_EQ(next.response_token_ids, expected.response_token_ids) << more;
    EXPECT_EQ(next.author_logprobs, expected.author_logprobs) << more;
    EXPECT_EQ(next.other_logprobs, expected.other_logprobs) << more;
    const auto next_score = Score(**engine, texts);
    ASSERT_TRUE(next_score.ok()) << next_score.status();
    EXPECT_EQ(next_score->sequences[0].senior_logprobs,
              expected_score->sequences[0].senior_logprobs);
    EXPECT_EQ(TakenBytes(), taken) << more;
  }
  EXPECT_GE(failures, 3);
}

}  // namespace
}  // namespace tandem::rollout
