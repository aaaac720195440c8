#include "common/base/files/paths/path_roots.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class PathRootsTest : public testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::canonical(testing::TempDir()) /
            testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(base_);
    fs::create_directories(base_ / "runs");
    fs::create_directories(base_ / "secrets");
  }
  void TearDown() override { fs::remove_all(base_); }

  bool Allows(const fs::path& path) const {
    const auto confined = roots().Confine("path", path.string());
    if (!confined.ok()) {
      EXPECT_EQ(confined.status().code(), absl::StatusCode::kPermissionDenied);
      EXPECT_TRUE(HasReason(confined.status(), reason::kPathOutsideRoots));
      EXPECT_EQ(FieldPath(confined.status()), "path");
    }
    return confined.ok();
  }
  PathRoots roots() const { return PathRoots({(base_ / "runs").string()}); }

  fs::path base_;
};

TEST_F(PathRootsTest, PathsInsideARootAreAllowedWhetherOrNotTheyExist) {
  EXPECT_TRUE(Allows(base_ / "runs"));
  EXPECT_TRUE(Allows(base_ / "runs/"));
  EXPECT_TRUE(Allows(base_ / "runs/new/step_1"));
  EXPECT_TRUE(Allows(base_ / "runs/a/../b"));
}

TEST_F(PathRootsTest, PathsOutsideAreRefused) {
  EXPECT_FALSE(Allows(base_ / "secrets"));
  EXPECT_FALSE(Allows(base_));
  EXPECT_FALSE(Allows("/"));
  EXPECT_FALSE(Allows("relative"));
  // The name of a root, prolonged, is another directory.
  EXPECT_FALSE(Allows(base_ / "runs-of-others"));
}

TEST_F(PathRootsTest, DotsDoNotLeadOut) {
  EXPECT_FALSE(Allows(base_ / "runs/../secrets"));
  EXPECT_FALSE(Allows(base_ / "runs/new/../../secrets"));
}

TEST_F(PathRootsTest, LinksDoNotLeadOut) {
  fs::create_directory_symlink(base_ / "secrets", base_ / "runs/link");
  EXPECT_FALSE(Allows(base_ / "runs/link"));
  EXPECT_FALSE(Allows(base_ / "runs/link/new"));
}

TEST_F(PathRootsTest, ALinkToNothingIsRefused) {
  fs::create_directory_symlink(base_ / "secrets/new", base_ / "runs/link");
  EXPECT_FALSE(Allows(base_ / "runs/link"));
  EXPECT_FALSE(Allows(base_ / "runs/link/step"));
}

TEST_F(PathRootsTest, ARootMayBeALink) {
  fs::create_directory_symlink(base_ / "runs", base_ / "link");
  const auto confined =
      PathRoots({(base_ / "link").string()}).Confine("path", (base_ / "link/step").string());
  ASSERT_TRUE(confined.ok()) << confined.status();
  EXPECT_EQ(confined->path, (base_ / "runs/step").string());
  EXPECT_EQ(confined->root, (base_ / "runs").string());
}

TEST_F(PathRootsTest, NoRootAllowsNothingAndNoListAllowsEverything) {
  EXPECT_EQ(PathRoots(std::vector<std::string>{}).Confine("path", "/tmp/a").status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(PathRoots().Confine("path", "a/../b")->path, "a/../b");
  EXPECT_EQ(PathRoots().Confine("path", "a/../b")->root, "");
  EXPECT_EQ(PathRoots().Confine("path", "").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem
