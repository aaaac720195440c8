#include "common/base/files/paths/path_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(PathCheckTest, PathsAreTakenAsTheyAre) {
  for (const char* path : {"/runs/1", "runs", ".", "./~", "a~b", "/~"}) {
    EXPECT_TRUE(CheckPath("directory", path).ok()) << path;
  }
}

TEST(PathCheckTest, WhatOnlyAShellUnderstandsIsRefusedWithAHint) {
  for (const char* path : {"~", "~/runs", "~somebody/runs"}) {
    const absl::Status status = CheckPath("directory", path);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_EQ(FieldPath(status), "directory");
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("\"./") + path + "\""));
  }
}

TEST(PathCheckTest, NothingAndNulBytesAreRefused) {
  EXPECT_EQ(FieldPath(CheckPath("path", "")), "path");
  EXPECT_EQ(FieldPath(CheckPath("path", absl::string_view("a\0b", 3))), "path");
}

}  // namespace
}  // namespace tandem
