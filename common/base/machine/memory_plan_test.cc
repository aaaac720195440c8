#include "common/base/machine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tandem {
namespace {

TEST(MemoryPlanTest, APlanThatDoesNotFitIsRefusedWithTheNumbers) {
  const MemoryPlan plan = {{{"weights", 3'000'000'000}, {"logits", 500'000'000}}};
  EXPECT_TRUE(CheckFits(plan, {.host = 3'500'000'000}).ok());
  const absl::Status status = CheckFits(plan, {.host = 3'499'999'999});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("3.50 GB (weights 3.00 GB, logits 0.50 GB)"),
                             testing::HasSubstr("3.50 GB are available")));
}

TEST(MemoryPlanTest, TheMemoryOfADeviceIsNotThatOfTheHost) {
  const MemoryPlan plan = {{{"weights", 8'000, false}, {"staged_weight_update", 500}}};
  EXPECT_EQ(plan.total_bytes(), 8'500);
  EXPECT_EQ(plan.host_bytes(), 500);
  EXPECT_TRUE(CheckFits(plan, {.host = 500}).ok());
  EXPECT_FALSE(CheckFits(plan, {.host = 499}).ok());
}

TEST(MemoryPlanTest, EveryDeviceIsComparedWithItsOwnMemory) {
  const MemoryPlan plan = {.items = {{"senior_weights", 8'000'000'000, false},
                                     {"junior_weights", 1'000'000'000, false, "", 1},
                                     {"staged_weight_update", 500'000'000}},
                           .remedy = "a smaller kv_cache_bytes"};
  EXPECT_EQ(plan.device_bytes(0), 8'000'000'000);
  EXPECT_EQ(plan.device_bytes(1), 1'000'000'000);
  EXPECT_TRUE(CheckFits(plan, {}).ok()) << "nothing is known";
  EXPECT_TRUE(
      CheckFits(plan, {.host = 500'000'000, .devices = {8'000'000'000, 1'000'000'000}}).ok());
  const absl::Status first = CheckFits(plan, {.devices = {7'999'999'999, 9'000'000'000}});
  EXPECT_EQ(first.message(),
            "the configuration needs 8.00 GB of the GPU's memory (senior_weights 8.00 GB), but "
            "8.00 GB are available; remedies: a smaller kv_cache_bytes");
  const absl::Status second = CheckFits(plan, {.devices = {8'000'000'000, 500'000'000}});
  EXPECT_EQ(second.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(second.message()),
      testing::HasSubstr("1.00 GB of the junior's GPU (junior_weights 1.00 GB), but 0.50 GB"));
}

}  // namespace
}  // namespace tandem
