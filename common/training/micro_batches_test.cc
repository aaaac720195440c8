#include "common/training/micro_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::training {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(MicroBatchesTest, KeepsOrderAndBudget) {
  EXPECT_THAT(PlanMicroBatches({4, 4, 3, 9, 1}, 8),
              ElementsAre(MicroBatch{0, 2}, MicroBatch{2, 3}, MicroBatch{3, 4}, MicroBatch{4, 5}));
  EXPECT_THAT(PlanMicroBatches({4, 4, 3}, 100), ElementsAre(MicroBatch{0, 3}));
}

TEST(MicroBatchesTest, EmptySequencesTakeNoRoom) {
  EXPECT_THAT(PlanMicroBatches({8, 0, 0}, 8), ElementsAre(MicroBatch{0, 3}));
  EXPECT_THAT(PlanMicroBatches({0, 0}, 8), IsEmpty());
  EXPECT_THAT(PlanMicroBatches({}, 8), IsEmpty());
}

}  // namespace
}  // namespace tandem::training
