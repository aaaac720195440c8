#include "common/base/files/shared_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace tandem {
namespace {

std::string TemporaryFolder() { return std::filesystem::temp_directory_path().string(); }

// Returns the error of opening `shared`.
absl::StatusCode OpenError(const SharedFile& shared) { return OpenShared(shared).status().code(); }

TEST(SharedFileTest, AnotherProcessReadsAFileWithoutAName) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(TemporaryFolder()).value();
  ASSERT_TRUE(file.WriteAll("written here").ok());
  const SharedFile shared = Share(file).value();
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(file.get());  // else it would have the file anyhow
    std::string read(7, ' ');
    const auto opened = OpenShared(shared);
    const bool ok =
        opened.ok() &&
        (*opened)->Read(5, absl::MakeSpan(reinterpret_cast<std::byte*>(read.data()), 7)).ok();
    std::_Exit(ok && read == "en here" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SharedFileTest, NoOtherFileIsOpened) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(TemporaryFolder()).value();
  const SharedFile shared = Share(file).value();
  SharedFile other = shared;
  ++other.inode;
  EXPECT_EQ(OpenError(other), absl::StatusCode::kFailedPrecondition);
  other = shared;
  ++other.device;
  EXPECT_EQ(OpenError(other), absl::StatusCode::kFailedPrecondition);
  other = shared;
  other.descriptor = 1 << 20;
  EXPECT_EQ(OpenError(other), absl::StatusCode::kNotFound);
  other.process = -1;
  EXPECT_EQ(OpenError(other), absl::StatusCode::kNotFound);
}

TEST(SharedFileTest, AFileWithANameIsRefused) {
  const std::string path = TemporaryFolder() + "/tandem_shared_" + std::to_string(::getpid());
  const FileDescriptor file = FileDescriptor::Open(path, O_CREAT | O_RDWR).value();
  EXPECT_EQ(OpenError(Share(file).value()), absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove(path);
  EXPECT_TRUE(OpenShared(Share(file).value()).ok()) << "it has none any more";
}

// To open a named pipe would block, to read a device could be an action.
TEST(SharedFileTest, WhatIsNoRegularFileIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  EXPECT_EQ(OpenError({.process = ::getpid(), .descriptor = ends[0]}),
            absl::StatusCode::kInvalidArgument);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace tandem
