// Scheduler and generator allocate nothing in a step that only writes tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "common/base/steady_time.h"
#include "common/model/passes/layer_cache.h"
#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/testing/count_allocations.h"
#include "services/rollout/engine/testing/fake_runner.h"
#include "services/rollout/engine/testing/recording_listener.h"
#include "services/rollout/engine/testing/requests.h"

namespace tandem::rollout {
namespace {

// Runs a fake without counting its allocations.
class UncountedRunner final : public ModelRunner {
 public:
  explicit UncountedRunner(uint64_t weights) : runner_(weights, 61, 100) {}
  absl::Status Run(const Pass& pass, PassResults& results) override {
    const bool counted = counting_allocations.exchange(false);
    absl::Status status = runner_.Run(pass, results);
    counting_allocations = counted;
    return status;
  }

 private:
  FakeRunner runner_;
};

class GeneratorAllocationTest : public ::testing::Test {
 protected:
  GeneratorAllocationTest()
      : boundaries_(Vocabulary(), {}),
        senior_(1),
        junior_(2),
        generator_(
            {.limits = {.max_num_seqs = 4, .max_batched_tokens = 64, .num_blocks = {100, 100}},
             .request_limits = {.max_model_len = 500, .junior_max_model_len = 500},
             .eos_token_ids = {},
             .senior_weights = {0, "zero"},
             .junior_version = "junior"},
            &boundaries_, &senior_, &junior_) {}

  // Returns the number of allocations of a step, with what the engine asks for around it.
  int64_t Step() {
    return CountAllocations([&] {
      generator_.ExpireDeadlines(SteadyTime::Now());
      generator_.Step();
    });
  }
  int64_t HeldBlocks() {
    EngineStats stats;
    generator_.FillStats(stats);
    return (stats.senior_kv_tokens + stats.junior_kv_tokens) / kKvBlockTokens;
  }

  BoundarySets boundaries_;
  UncountedRunner senior_, junior_;
  Generator generator_;
};

TEST_F(GeneratorAllocationTest, OperatorNewCounts) {
  std::unique_ptr<std::vector<int>> memory;
  EXPECT_EQ(CountAllocations([&] { memory = std::make_unique<std::vector<int>>(3); }), 2);
}

TEST_F(GeneratorAllocationTest, AStepThatOnlyWritesTokensAllocatesNothing) {
  // A backlog waits behind the running sequences.
  for (PromptId id = 1; id <= 64; ++id) {
    PromptRequest request = RequestOf({.selection_strategy = kStrategies[id % 5]}, id);
    request.sampling.max_tokens = 400;
    request.tandem.boundary_token_ids = {1, 5, 9, 20, 31, 44};
    request.return_other_logprobs = id % 2 == 0;
    request.priority = static_cast<int32_t>(id % 3);
    request.deadline = SteadyTime::Now() + absl::Hours(1);
    generator_.Submit(id, {request, std::make_shared<RecordingListener>(1), id % 7});
  }
  // Prompts are read, and vectors get their sizes.
  for (int i = 0; i < 100; ++i) Step();
  const int64_t held = HeldBlocks();
  std::vector<int64_t> counts;
  for (int i = 0; i < 100; ++i) counts.push_back(Step());
  // What a step that fills a block allocates: the block's tokens, its entry, the table's growth.
  // A lane of each of the four sequences may have filled its last block and not begun the next.
  const int64_t filled = HeldBlocks() - held + 4 * 2;
  EXPECT_LE(100 - std::ranges::count(counts, 0), filled);
  EXPECT_LE(std::accumulate(counts.begin(), counts.end(), int64_t{0}), 3 * filled);
  EXPECT_LT(filled, 25) << "most steps fill no block";
  EXPECT_EQ(generator_.running(), 4);
}

}  // namespace
}  // namespace tandem::rollout
