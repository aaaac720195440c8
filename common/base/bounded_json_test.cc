#include "common/base/bounded_json.h"

#include <gtest/gtest.h>

#include <string>

namespace tandem {
namespace {

TEST(BoundedJsonTest, ReadsADocument) {
  EXPECT_EQ(ParseBoundedJson(R"({"a": [1, {"b": "]]]"}]})", "f").value()["a"][0], 1);
}

TEST(BoundedJsonTest, DepthIsBoundedBeforeParsing) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(ParseBoundedJson(nested(kMaxJsonDepth), "f").ok());
  EXPECT_EQ(ParseBoundedJson(nested(kMaxJsonDepth + 1), "f").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(ParseBoundedJson(std::string(1'000'000, '['), "f").ok());
}

TEST(BoundedJsonTest, ADuplicateKeyIsRefusedByName) {
  const absl::Status status = ParseBoundedJson(R"({"a": {"k": 1, "k": 2}})", "f").status();
  EXPECT_EQ(status.message(), "f: key 'k' appears twice");
}

TEST(BoundedJsonTest, TextThatIsNotJsonIsRefused) {
  EXPECT_FALSE(ParseBoundedJson("{", "f").ok());
  EXPECT_FALSE(ParseBoundedJson("", "f").ok());
}

}  // namespace
}  // namespace tandem
