#include "common/checkpoint/replace_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/files/file_writer.h"
#include "common/checkpoint/manifest.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kAside[] = ".tandem-old-target";

class ReplaceDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    parent_ = fs::temp_directory_path() / ("tandem_replace_" + std::to_string(::getpid()));
    fs::remove_all(parent_);
    Make("old", "target");
    Make("new", "fresh");
  }
  void TearDown() override { fs::remove_all(parent_); }

  // Makes a checkpoint whose manifest names "target", in a directory of any name.
  void Make(const std::string& content, const std::string& name) {
    MakeForeign(content, name);
    ASSERT_TRUE(WriteManifestOf(name, "target").ok());
  }
  // Writes the manifest of a directory made by MakeForeign, which names `checkpoint`.
  absl::Status WriteManifestOf(const std::string& name, const std::string& checkpoint) {
    WrittenFiles written;
    TANDEM_ASSIGN_OR_RETURN(const std::string content, ReadFile(Path(name) + "/file"));
    TANDEM_RETURN_IF_ERROR(WriteFileDurably(Path(name) + "/file", content));
    return WriteManifest(Path(name), checkpoint, {.kind = "trainer"}, written.Take()).status();
  }
  void MakeForeign(const std::string& content, const std::string& name) {
    fs::create_directories(parent_ / name);
    ASSERT_TRUE(WriteFileDurably(Path(name) + "/file", content).ok());
  }
  std::string Path(const std::string& name) const { return (parent_ / name).string(); }
  std::string Content() const { return ReadFile(Path("target") + "/file").value_or("missing"); }
  size_t Entries() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(parent_), fs::directory_iterator()));
  }

  fs::path parent_;
};

TEST_F(ReplaceDirectoryTest, ExchangesWhereTheFileSystemCan) {
  ASSERT_TRUE(ReplaceDirectory(Path("fresh"), Path("target")).ok());
  EXPECT_EQ(Content(), "new");
  EXPECT_EQ(Entries(), 1u);
}

class WithoutExchangeTest : public ReplaceDirectoryTest,
                            public ::testing::WithParamInterface<int> {};

TEST_P(WithoutExchangeTest, StepsAsideInstead) {
  const auto refuse = [](const std::string&, const std::string&) { return GetParam(); };
  ASSERT_TRUE(ReplaceDirectory(Path("fresh"), Path("target"), refuse).ok());
  EXPECT_EQ(Content(), "new");
  EXPECT_EQ(Entries(), 1u);
}
INSTANTIATE_TEST_SUITE_P(All, WithoutExchangeTest, testing::Values(EINVAL, ENOSYS, EOPNOTSUPP));

TEST_F(ReplaceDirectoryTest, AnotherFailureChangesNothing) {
  const auto fail = [](const std::string&, const std::string&) { return EIO; };
  EXPECT_FALSE(ReplaceDirectory(Path("fresh"), Path("target"), fail).ok());
  EXPECT_EQ(Content(), "old");
  EXPECT_EQ(Entries(), 2u);
}

TEST_F(ReplaceDirectoryTest, AFailureInBetweenPutsTheOldOneBack) {
  const auto refuse_and_lose = [&](const std::string& from, const std::string&) {
    fs::remove_all(from);
    return EINVAL;
  };
  EXPECT_FALSE(ReplaceDirectory(Path("fresh"), Path("target"), refuse_and_lose).ok());
  EXPECT_EQ(Content(), "old");
}

TEST_F(ReplaceDirectoryTest, ACrashInBetweenIsUndone) {
  fs::rename(Path("target"), Path(kAside));
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_EQ(Content(), "old");
  fs::rename(Path("target"), Path(kAside));
  ASSERT_TRUE(RecoverDirectory(Path("target/")).ok());
  EXPECT_EQ(Content(), "old");
}

TEST_F(ReplaceDirectoryTest, ACrashAfterwardsLeavesTheNewOneAlone) {
  Make("older", kAside);
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_EQ(Content(), "old");
  EXPECT_FALSE(fs::exists(Path(kAside)));
}

// The user's folders have the name of an old checkpoint, but no manifest, or that of another
// checkpoint, or a file that the manifest does not list.
TEST_F(ReplaceDirectoryTest, RecoveryNeitherMovesNorRemovesForeignFolders) {
  MakeForeign("thesis", ".old-target");
  MakeForeign("thesis", kAside);
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_TRUE(fs::exists(Path(".old-target") + "/file"));
  EXPECT_TRUE(fs::exists(Path(kAside) + "/file"));

  fs::rename(Path("target"), Path("away"));
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_FALSE(fs::exists(Path("target")));
  ASSERT_TRUE(WriteManifestOf(kAside, "other").ok());
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_FALSE(fs::exists(Path("target")));
  fs::remove(Path(kAside) + "/manifest.json");
  ASSERT_TRUE(WriteManifestOf(kAside, "target").ok());
  ASSERT_TRUE(WriteFileDurably(Path(kAside) + "/notes", "x").ok());
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_FALSE(fs::exists(Path("target")));
  EXPECT_TRUE(fs::exists(Path(kAside) + "/notes"));
}

TEST_F(ReplaceDirectoryTest, AForeignFolderInTheWayIsNamedAndStays) {
  MakeForeign("thesis", kAside);
  const auto refuse = [](const std::string&, const std::string&) { return EINVAL; };
  const absl::Status status = ReplaceDirectory(Path("fresh"), Path("target"), refuse);
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(kAside));
  EXPECT_EQ(Content(), "old");
  EXPECT_TRUE(fs::exists(Path(kAside) + "/file"));
}

}  // namespace
}  // namespace tandem::checkpoint
