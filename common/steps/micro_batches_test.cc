#include "common/steps/micro_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tandem::training {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(MicroBatchesTest, KeepsOrderAndBudget) {
  EXPECT_THAT(PlanMicroBatches({4, 4, 3, 9, 1}, 8),
              ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 3}, MicroBatch{3, 4}, MicroBatch{4, 5}));
  EXPECT_THAT(PlanMicroBatches({4, 4, 3}, 100), ElementsAre(MicroBatch{0, 3}));
}

TEST(MicroBatchesTest, RanksHaveTheSameNumberOfEvenTurns) {
  const std::vector<int64_t> tens(9, 10);
  // One rank: 40, 40, 10. Two ranks need two turns anyway, so there are four even micro-batches.
  EXPECT_THAT(PlanMicroBatches(tens, 40),
              ElementsAre(MicroBatch{0, 4}, MicroBatch{4, 8}, MicroBatch{8, 9}));
  EXPECT_THAT(PlanMicroBatches(tens, 40, 2),
              ElementsAre(MicroBatch{0, 3}, MicroBatch{3, 6}, MicroBatch{6, 9}));
  EXPECT_THAT(PlanMicroBatches({10, 10, 10, 10}, 40, 2),
              ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 4}));
  // No sequence is cut, and a sequence that is longer than the others adds no turn.
  EXPECT_THAT(PlanMicroBatches({5, 50, 5}, 60, 2), ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 3}));
  EXPECT_THAT(PlanMicroBatches({7}, 40, 4), ElementsAre(MicroBatch{0, 1}));
  EXPECT_THAT(PlanMicroBatches({}, 40, 4), IsEmpty());
}

TEST(MicroBatchesTest, SharedTokensCountOnceInAMicroBatch) {
  // Two groups of three: 10 + 4 + 4 tokens each, where apart two sequences fill a micro-batch.
  const std::vector<int64_t> lengths(6, 10), shared = {0, 6, 6, 0, 6, 6};
  EXPECT_THAT(PlanMicroBatches(lengths, 20),
              ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 4}, MicroBatch{4, 6}));
  EXPECT_THAT(PlanMicroBatches(lengths, 20, 1, shared),
              ElementsAre(MicroBatch{0, 3}, MicroBatch{3, 6}));
  // The first sequence of a micro-batch stands there with all of its tokens.
  EXPECT_THAT(PlanMicroBatches(lengths, 14, 1, shared),
              ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 3}, MicroBatch{3, 5}, MicroBatch{5, 6}));
  EXPECT_THAT(PlanMicroBatches(lengths, 28, 2, shared),
              ElementsAre(MicroBatch{0, 3}, MicroBatch{3, 6}));
  // A sequence between them that is not read.
  EXPECT_THAT(PlanMicroBatches({10, 0, 10}, 14, 1, {0, 0, 6}), ElementsAre(MicroBatch{0, 3}));
}

TEST(MicroBatchesTest, EmptySequencesTakeNoRoom) {
  EXPECT_THAT(PlanMicroBatches({8, 0, 0}, 8), ElementsAre(MicroBatch{0, 3}));
  EXPECT_THAT(PlanMicroBatches({0, 0}, 8), IsEmpty());
  EXPECT_THAT(PlanMicroBatches({}, 8), IsEmpty());
}

}  // namespace
}  // namespace tandem::training
