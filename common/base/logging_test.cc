#include "common/base/logging.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace tandem {
namespace {

TEST(LoggingTest, LineIsOneJsonObjectWithTypedFields) {
  const std::string line =
      FormatLogLine(LogLevel::kWarning, "chunk_damaged",
                    {{"index", 3}, {"fraction", 0.5}, {"open", true}, {"update_id", "u\n1"}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["level"], "warning");
  EXPECT_EQ(json["event"], "chunk_damaged");
  EXPECT_EQ(json["index"], 3);
  EXPECT_EQ(json["fraction"], 0.5);
  EXPECT_EQ(json["open"], true);
  EXPECT_EQ(json["update_id"], "u\n1");
  EXPECT_FALSE(json.contains("request_id"));
  EXPECT_TRUE(json["ts"].get<std::string>().ends_with("Z"));
}

TEST(LoggingTest, NamesOfACallComeFromTheInnermostScope) {
  const auto line = [] { return nlohmann::json::parse(FormatLogLine(LogLevel::kInfo, "x", {})); };
  const ScopedCallLog outer("a", "");
  {
    const ScopedCallLog inner("b", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    EXPECT_EQ(line()["request_id"], "b");
    EXPECT_EQ(line()["trace_id"], "0af7651916cd43dd8448eb211c80319c");
    EXPECT_EQ(line()["span_id"], "b7ad6b7169203331");
  }
  EXPECT_EQ(line()["request_id"], "a");
  EXPECT_FALSE(line().contains("trace_id"));
}

TEST(LoggingTest, TextThatIsNotUtf8DoesNotThrow) {
  EXPECT_NO_THROW(FormatLogLine(LogLevel::kInfo, "x", {{"bytes", "\xff\xfe"}}));
}

TEST(LoggingTest, LevelsHaveNames) {
  for (const char* name : {"debug", "info", "warning", "error"}) {
    ASSERT_TRUE(ParseLogLevel(name).has_value()) << name;
    EXPECT_EQ(LogLevelName(*ParseLogLevel(name)), name);
  }
  EXPECT_FALSE(ParseLogLevel("loud").has_value());
}

}  // namespace
}  // namespace tandem
