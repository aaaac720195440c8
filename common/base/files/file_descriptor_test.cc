#include "common/base/files/file_descriptor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <vector>

namespace tandem {
namespace {

using testing::HasSubstr;

class FileDescriptorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tandem_file_descriptor_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static absl::Span<const std::byte> Bytes(absl::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
  }

  std::filesystem::path folder_;
};

TEST_F(FileDescriptorTest, AnUnnamedFileHoldsWhatIsWrittenAtAnyPlace) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(folder_.string()).value();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  ASSERT_TRUE(file.WriteAllAt(5, Bytes("later")).ok());
  ASSERT_TRUE(file.WriteAllAt(0, Bytes("first")).ok());
  std::string read(8, ' ');
  ASSERT_TRUE(file.ReadAllAt(1, absl::MakeSpan(reinterpret_cast<std::byte*>(read.data()), 8)).ok());
  EXPECT_EQ(read, "irstlate");
  const absl::Status beyond =
      file.ReadAllAt(3, absl::MakeSpan(reinterpret_cast<std::byte*>(read.data()), 8));
  EXPECT_EQ(beyond.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("ends at byte 10"));
}

TEST_F(FileDescriptorTest, SpaceIsReserved) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(folder_.string()).value();
  ASSERT_TRUE(file.Reserve(0).ok());
  ASSERT_TRUE(file.Reserve(100'000).ok());
  struct stat info = {};
  ASSERT_EQ(::fstat(file.get(), &info), 0);
  if (info.st_size == 0) GTEST_SKIP() << "this file system reserves nothing";
  EXPECT_EQ(info.st_size, 100'000);
  EXPECT_GE(info.st_blocks * 512, 100'000);
}

// The lack of space is found before the allocation is tried: until it failed, it would take the
// space that other processes need.
TEST_F(FileDescriptorTest, MoreThanThereIsIsNotTried) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(folder_.string()).value();
  const absl::Status status = file.Reserve(int64_t{1} << 62);  // more than a file holds
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("No space left on device"));
}

TEST_F(FileDescriptorTest, ErrorsNameThePlace) {
  const absl::Status missing =
      FileDescriptor::CreateUnnamed((folder_ / "missing").string()).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr((folder_ / "missing").string()));
  const FileDescriptor readable = FileDescriptor::Open("/dev/null", O_RDONLY).value();
  EXPECT_THAT(std::string(readable.WriteAllAt(0, Bytes("x")).message()),
              HasSubstr("cannot write /dev/null"));
  EXPECT_THAT(std::string(readable.Reserve(1).message()), HasSubstr("cannot reserve 1 bytes"));
}

}  // namespace
}  // namespace tandem
