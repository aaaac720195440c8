#include "common/checkpoint/replace_directory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "common/base/atomic_file.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

class ReplaceDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    parent_ = fs::temp_directory_path() / ("tandem_replace_" + std::to_string(::getpid()));
    fs::remove_all(parent_);
    Make("old", "target");
    Make("new", "fresh");
  }
  void TearDown() override { fs::remove_all(parent_); }

  void Make(const std::string& content, const std::string& name) {
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
  fs::rename(Path("target"), Path(".old-target"));
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_EQ(Content(), "old");
}

TEST_F(ReplaceDirectoryTest, ACrashAfterwardsLeavesTheNewOneAlone) {
  Make("older", ".old-target");
  ASSERT_TRUE(RecoverDirectory(Path("target")).ok());
  EXPECT_EQ(Content(), "old");
  EXPECT_FALSE(fs::exists(Path(".old-target")));
}

}  // namespace
}  // namespace tandem::checkpoint
