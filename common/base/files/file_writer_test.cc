#include "common/base/files/file_writer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "common/base/checksum.h"
#include "common/base/files/atomic_file.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::string DigestOf(const std::string& bytes) {
  return Checksum().Update(bytes.data(), bytes.size()).Hex();
}

absl::Span<const std::byte> Bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

class FileWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("tandem_file_writer_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  // Expects one listed file, which has these bytes.
  void ExpectListed(WrittenFiles& written, const std::string& path, const std::string& bytes) {
    const std::vector<WrittenFile> files = written.Take();
    ASSERT_EQ(files.size(), 1u);
    EXPECT_EQ(files[0].path, path);
    EXPECT_EQ(files[0].bytes, static_cast<int64_t>(bytes.size()));
    EXPECT_EQ(files[0].digest, DigestOf(bytes));
    EXPECT_EQ(ReadFile(path).value(), bytes);
  }

  fs::path folder_;
};

TEST_F(FileWriterTest, WhateverFunctionWritesTheDigestIsThatOfTheFile) {
  const std::string text(3'000'000, 'x');  // several transfers
  WrittenFiles written;
  ASSERT_TRUE(WriteFileDurably(Path("a"), text).ok());
  ExpectListed(written, Path("a"), text);
  ASSERT_TRUE(WriteFileAtomically(Path("b"), "short").ok());
  ExpectListed(written, Path("b"), "short");
  ASSERT_TRUE(CopyFileDurably(Path("a"), Path("c")).ok());
  ExpectListed(written, Path("c"), text);
  ASSERT_TRUE(WriteFileDurably(Path("d"), "").ok());
  ExpectListed(written, Path("d"), "");
}

TEST_F(FileWriterTest, RangesInAnyOrderHaveTheDigestOfTheWhole) {
  const std::string text = "0123456789abcdef";
  for (const std::vector<size_t>& order :
       {std::vector<size_t>{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 0, 2, 3}}) {
    WrittenFiles written;
    FileWriter file = FileWriter::Create(Path("a")).value();
    for (const size_t quarter : order) {
      const std::string bytes = text.substr(4 * quarter, 4);
      ASSERT_TRUE(file.WriteAt(static_cast<int64_t>(4 * quarter), Bytes(bytes)).ok());
    }
    ASSERT_TRUE(file.Finish().ok());
    ExpectListed(written, Path("a"), text);
  }
}

TEST_F(FileWriterTest, AHoleIsAnError) {
  const WrittenFiles written;
  FileWriter file = FileWriter::Create(Path("a")).value();
  ASSERT_TRUE(file.WriteAt(4, Bytes("late")).ok());
  EXPECT_EQ(file.Finish().code(), absl::StatusCode::kInternal);
}

TEST_F(FileWriterTest, WhatIsNotFinishedIsListedNowhereAndLeavesTheOldFile) {
  ASSERT_TRUE(WriteFileDurably(Path("a"), "old").ok());
  WrittenFiles written;
  {
    FileWriter file = FileWriter::Create(Path("a"), FileWriter::Place::kBeside).value();
    ASSERT_TRUE(file.Append("new").ok());
  }
  EXPECT_TRUE(written.Take().empty());
  EXPECT_EQ(ReadFile(Path("a")).value(), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

TEST_F(FileWriterTest, TheInnermostListGetsTheFile) {
  WrittenFiles outer;
  {
    WrittenFiles inner;
    ASSERT_TRUE(WriteFileDurably(Path("a"), "x").ok());
    EXPECT_EQ(inner.Take().size(), 1u);
  }
  EXPECT_TRUE(outer.Take().empty());
  ASSERT_TRUE(WriteFileDurably(Path("b"), "x").ok());
  EXPECT_EQ(outer.Take().size(), 1u);
}

}  // namespace
}  // namespace tandem
