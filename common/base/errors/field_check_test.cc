#include "common/base/errors/field_check.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tandem {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(FieldCheckTest, BoundsBelongToTheirRange) {
  EXPECT_TRUE(CheckInRange("x", 0.0, 0, 1).ok());
  EXPECT_TRUE(CheckInRange("x", 1.0, 0, 1).ok());
  EXPECT_TRUE(CheckBelow("x", 0.0, 0, 1).ok());
  EXPECT_FALSE(CheckBelow("x", 1.0, 0, 1).ok());
  EXPECT_TRUE(CheckAtLeast("x", 3, 3).ok());
  EXPECT_FALSE(CheckAbove("x", 3, 3).ok());
}

TEST(FieldCheckTest, ErrorNamesFieldBoundAndValue) {
  const absl::Status status = CheckInRange("sampling.top_k", 7, 0, 5);
  EXPECT_EQ(FieldPath(status), "sampling.top_k");
  EXPECT_EQ(status.message(), "sampling.top_k: must be in [0, 5], got 7");
}

TEST(FieldCheckTest, NanAndInfinityPassNothing) {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    EXPECT_FALSE(CheckInRange("x", bad, -1e300, 1e300).ok()) << bad;
    EXPECT_FALSE(CheckBelow("x", bad, -1e300, 1e300).ok()) << bad;
    EXPECT_FALSE(CheckAtLeast("x", bad, -1e300).ok()) << bad;
    EXPECT_FALSE(CheckAbove("x", bad, -1e300).ok()) << bad;
    EXPECT_FALSE(CheckFinite("x", bad).ok()) << bad;
  }
}

TEST(FieldCheckTest, FirstBadEntryIsNamed) {
  const std::vector<float> values = {0, 1, static_cast<float>(kNan), static_cast<float>(kNan)};
  EXPECT_EQ(FieldPath(CheckFinite("returns", values)), "returns[2]");
  const std::vector<int32_t> ids = {0, 9, 10, -1};
  EXPECT_EQ(FieldPath(CheckTokenIds("ids", ids, 10)), "ids[2]");
  EXPECT_EQ(FieldPath(CheckTokenIds("ids", ids, 11)), "ids[3]");
  EXPECT_TRUE(CheckTokenIds("ids", std::span(ids).first(2), 10).ok());
}

TEST(FieldCheckTest, EmptyTextIsNotGiven) {
  EXPECT_TRUE(CheckGiven("model", "m").ok());
  EXPECT_EQ(FieldPath(CheckGiven("model", "")), "model");
}

}  // namespace
}  // namespace tandem
