#include "common/base/files/paths/confined_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>

#include "common/base/files/atomic_file.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/paths/path_roots.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Missing = ConfinedFolder::Missing;

class ConfinedFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::canonical(testing::TempDir()) /
            (std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) +
             std::to_string(::getpid()));
    fs::remove_all(base_);
    fs::create_directories(base_ / "root");
    fs::create_directories(base_ / "outside");
  }
  void TearDown() override { fs::remove_all(base_); }
  std::string Path(const std::string& name) const { return (base_ / name).string(); }
  ConfinedPath InRoot(const std::string& name) const {
    return PathRoots({Path("root")}).Confine("path", Path("root/" + name)).value();
  }
  bool NothingIsOutside() const { return fs::is_empty(base_ / "outside"); }

  fs::path base_;
};

TEST_F(ConfinedFolderTest, FilesOfTheFolderAreReadAndWritten) {
  const auto folder = ConfinedFolder::Enter(InRoot("a/b"), Missing::kIsCreated);
  ASSERT_TRUE(folder.ok()) << folder.status();
  ASSERT_TRUE(WriteFileDurably(Path("root/a/b/file"), "x").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("root/a/b/file"), "y").ok());
  EXPECT_EQ(ReadFile(Path("root/a/b/file")).value(), "y");
  ASSERT_TRUE(RenameDurably(Path("root/a/b/file"), Path("root/a/b/other")).ok());
  EXPECT_TRUE(SyncPath(Path("root/a/b")).ok());
  // What lies elsewhere is as ever.
  ASSERT_TRUE(WriteFileDurably(Path("elsewhere"), "z").ok());
  EXPECT_EQ(ReadFile(Path("elsewhere")).value(), "z");
}

TEST_F(ConfinedFolderTest, AMissingFolderIsNotFound) {
  EXPECT_EQ(ConfinedFolder::Enter(InRoot("a"), Missing::kIsError).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ConfinedFolderTest, TheOpenFolderStaysTheOneThatWasOpened) {
  const ConfinedFolder folder = ConfinedFolder::Enter(InRoot("a"), Missing::kIsCreated).value();
  fs::rename(base_ / "root/a", base_ / "root/moved");
  fs::create_directory_symlink(base_ / "outside", base_ / "root/a");
  ASSERT_TRUE(WriteFileDurably(Path("root/a/file"), "x").ok());
  EXPECT_TRUE(fs::exists(base_ / "root/moved/file"));
  EXPECT_TRUE(fs::exists(SystemPath(Path("root/a/file"))));
  EXPECT_TRUE(NothingIsOutside());
}

TEST_F(ConfinedFolderTest, ALinkInTheWayIsNotFollowed) {
  const ConfinedPath checked = InRoot("a/b");
  fs::create_directory_symlink(base_ / "outside", base_ / "root/a");
  for (const Missing missing : {Missing::kIsError, Missing::kIsCreated}) {
    EXPECT_EQ(ConfinedFolder::Enter(checked, missing).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_TRUE(NothingIsOutside());
}

// Links, also those that stay inside: of a file, of a folder, to nothing, and hard to see ones.
TEST_F(ConfinedFolderTest, FilesBehindLinksAreNeitherReadNorWritten) {
  ASSERT_TRUE(WriteFileDurably(Path("secret"), "secret").ok());
  const ConfinedFolder folder = ConfinedFolder::Enter(InRoot("a"), Missing::kIsCreated).value();
  fs::create_symlink(base_ / "secret", base_ / "root/a/file");
  fs::create_symlink("../../secret", base_ / "root/a/relative");
  fs::create_symlink(base_ / "outside/new", base_ / "root/a/dangling");
  fs::create_directory_symlink(base_ / "outside", base_ / "root/a/folder");
  for (const char* name : {"file", "relative", "dangling", "folder/new", "../../secret"}) {
    const std::string path = Path("root/a") + "/" + name;
    EXPECT_FALSE(ReadFile(path).ok()) << name;
    EXPECT_FALSE(WriteFileDurably(path, "x").ok()) << name;
  }
  EXPECT_EQ(ReadFile(Path("root/a/file")).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadFile(Path("secret")).value(), "secret");
  EXPECT_TRUE(NothingIsOutside());
}

// Somebody who may write inside the root changes folders into links, and back, all the time.
TEST_F(ConfinedFolderTest, ARaceNeverLeadsOutOfTheRoot) {
  fs::create_directories(base_ / "root/a/b");
  fs::create_directory_symlink(base_ / "outside", base_ / "root/link");
  std::atomic<bool> done = false;
  std::thread attacker([&] {
    while (!done) {
      ::renameat2(AT_FDCWD, Path("root/a").c_str(), AT_FDCWD, Path("root/link").c_str(),
                  RENAME_EXCHANGE);
    }
  });
  int written = 0;
  for (int i = 0; i < 2000 || written == 0; ++i) {
    const auto checked = PathRoots({Path("root")}).Confine("path", Path("root/a/b"));
    if (!checked.ok()) continue;
    const auto folder = ConfinedFolder::Enter(*checked, Missing::kIsCreated);
    if (!folder.ok()) continue;
    if (WriteFileDurably(checked->path + "/file", "x").ok()) ++written;
  }
  done = true;
  attacker.join();
  EXPECT_TRUE(NothingIsOutside());
}

TEST_F(ConfinedFolderTest, TheParentOfARootIsTheOperators) {
  EXPECT_EQ(InRoot("a").parent().root, Path("root"));
  EXPECT_EQ(InRoot("a").parent().path, Path("root"));
  EXPECT_EQ(InRoot("").parent().root, base_.string());
  EXPECT_EQ(ConfinedPath("a").parent().path, ".");
  EXPECT_TRUE(ConfinedFolder::Enter(InRoot("").parent(), Missing::kIsError).ok());
}

}  // namespace
}  // namespace tandem
