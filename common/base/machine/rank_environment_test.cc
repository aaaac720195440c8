#include "common/base/machine/rank_environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem {
namespace {

using Variables = std::map<std::string, std::string>;

const Variables kComplete = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node-0"},
                             {"MASTER_PORT", "29500"}};

absl::StatusOr<RankEnvironment> ReadWith(const Variables& variables) {
  for (const auto& [name, unused] : kComplete) unsetenv(name.c_str());
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  absl::StatusOr<RankEnvironment> environment = ReadRankEnvironment();
  for (const auto& [name, unused] : kComplete) unsetenv(name.c_str());
  return environment;
}

TEST(RankEnvironmentTest, NothingSetIsAWorldOfOne) {
  const auto environment = ReadWith({});
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->rank, 0);
  EXPECT_EQ(environment->world_size, 1);
  EXPECT_EQ(environment->local_rank, 0);
  EXPECT_EQ(environment->local_world_size, 1);
}

TEST(RankEnvironmentTest, ReadsWhatTorchrunSets) {
  const auto environment = ReadWith(kComplete);
  ASSERT_TRUE(environment.ok()) << environment.status();
  EXPECT_EQ(environment->rank, 5);
  EXPECT_EQ(environment->world_size, 8);
  EXPECT_EQ(environment->local_rank, 1);
  EXPECT_EQ(environment->local_world_size, 4);
  EXPECT_EQ(environment->master_addr, "node-0");
  EXPECT_EQ(environment->master_port, 29500);
}

TEST(RankEnvironmentTest, OneMachineUnlessItsRanksAreSet) {
  Variables variables = kComplete;
  variables.erase("LOCAL_RANK");
  variables.erase("LOCAL_WORLD_SIZE");
  const auto environment = ReadWith(variables);
  ASSERT_TRUE(environment.ok()) << environment.status();
  EXPECT_EQ(environment->local_rank, 5);
  EXPECT_EQ(environment->local_world_size, 8);
}

TEST(RankEnvironmentTest, ARankThatIsAloneInItsContainerIsItsFirst) {
  Variables variables = kComplete;
  variables.erase("LOCAL_RANK");
  variables["LOCAL_WORLD_SIZE"] = "1";
  const auto environment = ReadWith(variables);
  ASSERT_TRUE(environment.ok()) << environment.status();
  EXPECT_EQ(environment->local_rank, 0);
}

TEST(RankEnvironmentTest, AMissingVariableIsNamed) {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = kComplete;
    variables.erase(name);
    const absl::Status status = ReadWith(variables).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(FieldPath(status), name);
  }
  EXPECT_EQ(FieldPath(ReadWith({{"LOCAL_RANK", "0"}}).status()), "WORLD_SIZE");
}

TEST(RankEnvironmentTest, AValueThatDoesNotFitIsNamed) {
  const std::pair<std::string, std::string> kRefused[] = {{"RANK", "8"},
                                                          {"RANK", "-1"},
                                                          {"RANK", "one"},
                                                          {"RANK", ""},
                                                          {"WORLD_SIZE", "0"},
                                                          {"WORLD_SIZE", "8x"},
                                                          {"LOCAL_RANK", "8"},
                                                          {"LOCAL_RANK", "-1"},
                                                          {"MASTER_PORT", "0"},
                                                          {"MASTER_ADDR", ""},
                                                          {"MASTER_PORT", "65536"},
                                                          {"LOCAL_WORLD_SIZE", "9"},
                                                          {"LOCAL_WORLD_SIZE", "0"}};
  for (const auto& [name, value] : kRefused) {
    Variables variables = kComplete;
    variables[name] = value;
    const absl::Status status = ReadWith(variables).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << "=" << value;
    EXPECT_EQ(FieldPath(status), name) << value;
  }
}

TEST(RankEnvironmentTest, AVariableThatIsAloneIsNamedWithItsValue) {
  for (const auto& [name, value] : kComplete) {
    const absl::Status status = ReadWith({{name, value}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find(absl::StrCat(name, "='", value, "'")), std::string::npos)
        << status;
  }
}

TEST(RankEnvironmentTest, AServiceCalledMasterIsExplained) {
  const absl::Status status = ReadWith({{"MASTER_PORT", "tcp://10.0.0.7:29500"}}).status();
  EXPECT_NE(status.message().find("Service called master"), std::string::npos) << status;
}

}  // namespace
}  // namespace tandem
