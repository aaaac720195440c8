#include "common/base/files/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

namespace tandem {
namespace {

class AtomicFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tandem_atomic_file_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  size_t EntryCount() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }
  std::filesystem::path folder_;
};

TEST_F(AtomicFileTest, ReplacesContentsAndLeavesNoTemporaryFile) {
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "first").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("a"), std::string("se\0cond", 7)).ok());
  EXPECT_EQ(ReadFile(Path("a")).value(), std::string("se\0cond", 7));
  EXPECT_EQ(EntryCount(), 1u);
}

TEST_F(AtomicFileTest, FailureNamesThePathAndKeepsTheOldFile) {
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "kept").ok());
  const absl::Status status = WriteFileAtomically(Path("missing/b"), "x");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(status.message().find("missing/b"), absl::string_view::npos);
  EXPECT_EQ(ReadFile(Path("a")).value(), "kept");
  EXPECT_EQ(EntryCount(), 1u);
}

TEST_F(AtomicFileTest, FullDiskIsResourceExhausted) {
  struct stat unused;
  if (::stat("/dev/full", &unused) != 0) GTEST_SKIP() << "no /dev/full here";
  EXPECT_EQ(WriteFileDurably("/dev/full", "x").code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(AtomicFileTest, CopyIsExact) {
  const std::string big(200000, 'x');
  ASSERT_TRUE(WriteFileDurably(Path("from"), big).ok());
  ASSERT_TRUE(CopyFileDurably(Path("from"), Path("to")).ok());
  EXPECT_EQ(ReadFile(Path("to")).value(), big);
  EXPECT_EQ(CopyFileDurably(Path("none"), Path("to2")).code(), absl::StatusCode::kNotFound);
}

// To open or to read any of these could block for ever, or never end.
TEST_F(AtomicFileTest, OnlyRegularFilesAreRead) {
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  std::filesystem::create_directories(Path("folder"));
  std::filesystem::create_symlink("pipe", Path("link"));
  for (const std::string& path :
       {Path("pipe"), Path("folder"), Path("link"), std::string("/dev/zero")}) {
    const absl::Status status = ReadFile(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_NE(status.message().find(path + ": not a regular file"), std::string::npos) << status;
    EXPECT_FALSE(CopyFileDurably(path, Path("copy")).ok()) << path;
  }
}

}  // namespace
}  // namespace tandem
