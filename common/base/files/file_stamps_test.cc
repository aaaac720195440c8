#include "common/base/files/file_stamps.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace tandem {
namespace {

namespace fs = std::filesystem;

class FileStampsTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(testing::TempDir()) /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::string Write(const std::string& name, const std::string& text) const {
    const fs::path path = directory_ / name;
    std::ofstream(path) << text;
    return path;
  }

  fs::path directory_;
};

TEST_F(FileStampsTest, AnUntouchedFileHasNotChanged) {
  FileStamps stamps({Write("a", "one")});
  EXPECT_FALSE(stamps.Changed());
  EXPECT_FALSE(stamps.Changed());
}

TEST_F(FileStampsTest, ARewrittenFileHasChangedOnce) {
  FileStamps stamps({Write("a", "one"), Write("b", "two")});
  Write("b", "another");
  EXPECT_TRUE(stamps.Changed());
  EXPECT_FALSE(stamps.Changed());
}

TEST_F(FileStampsTest, AFileBehindAnotherLinkHasChanged) {
  const std::string link = directory_ / "link";
  fs::create_symlink(Write("a", "one"), link);
  FileStamps stamps({link});
  fs::remove(link);
  fs::create_symlink(Write("b", "one"), link);
  EXPECT_TRUE(stamps.Changed());
}

TEST_F(FileStampsTest, AFileThatGoesOrComesHasChanged) {
  const std::string path = Write("a", "one");
  FileStamps stamps({path});
  fs::remove(path);
  EXPECT_TRUE(stamps.Changed());
  Write("a", "one");
  EXPECT_TRUE(stamps.Changed());
}

}  // namespace
}  // namespace tandem
