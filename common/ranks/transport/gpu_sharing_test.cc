#include "common/ranks/transport/gpu_sharing.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace tandem::ranks {
namespace {

TEST(GpuSharingTest, FindsTheFirstTwoRanksOfOneGpu) {
  EXPECT_EQ(RanksOnOneGpu({}), std::nullopt);
  EXPECT_EQ(RanksOnOneGpu({"a/1", "a/2", "b/1", "b/2"}), std::nullopt);
  EXPECT_EQ(RanksOnOneGpu({"a/1", "a/1"}), std::pair(0, 1));
  EXPECT_EQ(RanksOnOneGpu({"a/1", "a/2", "b/1", "a/2", "a/1"}), std::pair(1, 3));
}

}  // namespace
}  // namespace tandem::ranks
