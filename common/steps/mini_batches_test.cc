#include "common/steps/mini_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/base/errors/error.h"

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

TEST(MiniBatchesTest, GroupsStayWhole) {
  // Groups of 4, 4, 4 and of 3, 5, 1, 6 samples.
  EXPECT_EQ(SplitIntoMiniBatches(12, {.num_mini_batches = 2}, {0, 4, 8}),
            (std::vector<MiniBatch>{{0, 4}, {4, 12}}));
  EXPECT_EQ(SplitIntoMiniBatches(12, {.num_mini_batches = 3}, {0, 4, 8}),
            (std::vector<MiniBatch>{{0, 4}, {4, 8}, {8, 12}}));
  EXPECT_EQ(SplitIntoMiniBatches(15, {.num_mini_batches = 2}, {0, 3, 8, 9}),
            (std::vector<MiniBatch>{{0, 8}, {8, 15}}));
  EXPECT_EQ(SplitIntoMiniBatches(15, {.num_mini_batches = 4}, {0, 3, 8, 9}),
            (std::vector<MiniBatch>{{0, 3}, {3, 8}, {8, 9}, {9, 15}}));
  // A large group at the end leaves the others one each.
  EXPECT_EQ(SplitIntoMiniBatches(23, {.num_mini_batches = 3}, {0, 1, 2, 3}),
            (std::vector<MiniBatch>{{0, 2}, {2, 3}, {3, 23}}));
  // Fewer groups than mini-batches are divided.
  EXPECT_EQ(SplitIntoMiniBatches(8, {.num_mini_batches = 4}, {0, 4}),
            (std::vector<MiniBatch>{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
}

// Whatever the sizes of the groups, every mini-batch has samples and ends where a group ends.
TEST(MiniBatchesTest, EveryMiniBatchHasWholeGroups) {
  uint32_t state = 1;
  for (int round = 0; round < 500; ++round) {
    std::vector<size_t> groups;
    size_t samples = 0;
    for (int i = 0; i < 1 + round % 12; ++i) {
      groups.push_back(samples);
      state = state * 1664525 + 1013904223;
      samples += 1 + (state >> 24) % 9;
    }
    for (size_t count = 1; count <= groups.size(); ++count) {
      const auto batches =
          SplitIntoMiniBatches(samples, {.num_mini_batches = static_cast<int64_t>(count)}, groups);
      ASSERT_EQ(batches.size(), count);
      size_t begin = 0;
      for (const MiniBatch& batch : batches) {
        ASSERT_EQ(batch.begin, begin);
        ASSERT_LT(batch.begin, batch.end);
        ASSERT_TRUE(std::binary_search(groups.begin(), groups.end(), batch.begin));
        begin = batch.end;
      }
      ASSERT_EQ(begin, samples);
    }
  }
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
