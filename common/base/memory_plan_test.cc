#include "common/base/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tandem {
namespace {

TEST(MemoryPlanTest, APlanThatDoesNotFitIsRefusedWithTheNumbers) {
  const MemoryPlan plan = {{{"weights", 3'000'000'000}, {"logits", 500'000'000}}};
  EXPECT_TRUE(CheckFits(plan, 3'500'000'000).ok());
  const absl::Status status = CheckFits(plan, 3'499'999'999);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("3.50 GB (weights 3.00 GB, logits 0.50 GB)"),
                             testing::HasSubstr("3.50 GB are available")));
}

TEST(MemoryPlanTest, TheMemoryOfADeviceIsNotThatOfTheHost) {
  const MemoryPlan plan = {{{"weights", 8'000, false}, {"staged_weight_update", 500}}};
  EXPECT_EQ(plan.total_bytes(), 8'500);
  EXPECT_EQ(plan.host_bytes(), 500);
  EXPECT_TRUE(CheckFits(plan, 500).ok());
  EXPECT_FALSE(CheckFits(plan, 499).ok());
}

}  // namespace
}  // namespace tandem
