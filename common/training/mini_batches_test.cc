#include "common/training/mini_batches.h"

#include <gtest/gtest.h>

#include "common/base/error.h"

namespace tandem::training {
namespace {

TEST(MiniBatchesTest, CoverTheSamplesInOrderInEqualSizes) {
  EXPECT_EQ(SplitIntoMiniBatches(5, {}), (std::vector<MiniBatch>{{0, 5}}));
  EXPECT_EQ(SplitIntoMiniBatches(8, {.num_mini_batches = 4}),
            (std::vector<MiniBatch>{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
  EXPECT_EQ(SplitIntoMiniBatches(7, {.num_mini_batches = 3, .num_epochs = 9}),
            (std::vector<MiniBatch>{{0, 2}, {2, 4}, {4, 7}}));
  EXPECT_EQ(SplitIntoMiniBatches(2, {.num_mini_batches = 3}),
            (std::vector<MiniBatch>{{0, 1}, {1, 2}}));
  EXPECT_TRUE(SplitIntoMiniBatches(0, {}).empty());
}

TEST(MiniBatchesTest, NamesWhatIsOutOfRange) {
  EXPECT_TRUE(CheckUpdateOptions({.num_mini_batches = 1000, .num_epochs = 1000}).ok());
  for (const int64_t bad : {-1, 0, 1001}) {
    EXPECT_EQ(FieldPath(CheckUpdateOptions({.num_mini_batches = bad})), "num_mini_batches");
    EXPECT_EQ(FieldPath(CheckUpdateOptions({.num_epochs = bad})), "num_epochs");
  }
}

}  // namespace
}  // namespace tandem::training
