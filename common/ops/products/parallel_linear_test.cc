#include "common/ops/products/parallel_linear.h"

#include <gtest/gtest.h>

#include <vector>

namespace tandem::ops {
namespace {

std::vector<int64_t> Lengths(int64_t count, int threads) {
  std::vector<int64_t> lengths;
  int64_t begin = 0;
  for (const int64_t end : PanelRanges(count, threads)) {
    lengths.push_back(end - begin);
    begin = end;
  }
  EXPECT_EQ(begin, count);
  return lengths;
}

TEST(PanelRangesTest, LongRangesComeFirstAndShortOnesLast) {
  EXPECT_EQ(Lengths(36, 2), (std::vector<int64_t>{8, 8, 8, 4, 4, 2, 2}));
  EXPECT_EQ(Lengths(64, 2), (std::vector<int64_t>{16, 8, 8, 8, 8, 8, 4, 2, 2}));
}

TEST(PanelRangesTest, CoverEveryCountInLengthsThatKernelsMultiplyAtOnce) {
  for (const int threads : {1, 2, 3, 16}) {
    for (int64_t count = 0; count < 2000; ++count) {
      const std::vector<int64_t> lengths = Lengths(count, threads);
      for (size_t i = 0; i + 1 < lengths.size(); ++i) {
        const int64_t length = lengths[i];
        ASSERT_TRUE(length % 8 == 0 || length == 4 || length == 2) << count;
        ASSERT_LE(lengths[i + 1], length) << count;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::ops
