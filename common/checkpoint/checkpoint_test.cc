#include "common/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    parent_ = fs::temp_directory_path() / ("tandem_checkpoint_" + std::to_string(::getpid()));
    fs::remove_all(parent_);
  }
  void TearDown() override { fs::remove_all(parent_); }

  absl::StatusOr<Saved> SaveStep(const std::string& name, const std::string& weights = "weights",
                                 const Identity& identity = {"trainer", 1}) {
    return Save(
        parent_.string(), name, identity, [&](const std::string& directory) -> absl::Status {
          TANDEM_RETURN_IF_ERROR(WriteFileDurably(directory + "/model.safetensors", weights));
          return WriteFileDurably(directory + "/state.json", "{}");
        });
  }
  // Number of entries of the parent, hidden ones too.
  int64_t Entries() const { return std::distance(fs::directory_iterator(parent_), {}); }
  std::string Path(const std::string& name) const { return (parent_ / name).string(); }
  std::vector<std::string> Listed() const {
    std::vector<std::string> names;
    for (const auto& listed : List(parent_.string())) {
      names.push_back(fs::path(listed.path).filename().string());
    }
    return names;
  }

  fs::path parent_;
};

TEST_F(CheckpointTest, SavedDirectoryVerifies) {
  const Saved saved = SaveStep("step_1").value();
  EXPECT_EQ(saved.path, Path("step_1"));
  EXPECT_EQ(saved.bytes, 9);
  EXPECT_TRUE(Verify(saved.path).ok());
}

TEST_F(CheckpointTest, FlippedByteIsDataLossThatNamesTheFile) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  ASSERT_TRUE(WriteFileDurably(Path("step_1/model.safetensors"), "wEights").ok());
  const absl::Status status = Verify(Path("step_1"));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
}

TEST_F(CheckpointTest, TruncatedFileIsDataLoss) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  fs::resize_file(Path("step_1/model.safetensors"), 3);
  EXPECT_EQ(Verify(Path("step_1")).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, MissingFileIsDataLoss) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  fs::remove(Path("step_1/state.json"));
  const absl::Status status = Verify(Path("step_1"));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("state.json"));
}

TEST_F(CheckpointTest, UnlistedFileIsDataLoss) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  ASSERT_TRUE(WriteFileDurably(Path("step_1/extra"), "x").ok());
  EXPECT_EQ(Verify(Path("step_1")).code(), absl::StatusCode::kDataLoss);
}

// A checkpoint may hold a folder of plain files, all of which the manifest lists.
TEST_F(CheckpointTest, TheFilesOfAFolderAreListedAndVerified) {
  const auto save = [&](const std::vector<std::string>& files) {
    return Save(parent_.string(), "step_1", {"trainer", 1}, [&](const std::string& directory) {
      absl::Status status;
      for (const std::string& file : files) {
        const std::string path = absl::StrCat(directory, "/", file);
        fs::create_directories(fs::path(path).parent_path());
        status.Update(WriteFileDurably(path, "words"));
      }
      return status;
    });
  };
  ASSERT_TRUE(save({"a.txt", "folder/b.txt"}).ok());
  const Saved saved = save({"folder/b.txt", "folder/c.txt"}).value();  // replaces the first one
  EXPECT_EQ(saved.bytes, 10);
  EXPECT_TRUE(Verify(saved.path).ok());
  ASSERT_TRUE(WriteFileDurably(Path("step_1/folder/d.txt"), "").ok());
  EXPECT_THAT(std::string(Verify(saved.path).message()), HasSubstr("folder/d.txt"));
  EXPECT_FALSE(save({"a.txt"}).ok());
  fs::remove(Path("step_1/folder/d.txt"));
  ASSERT_TRUE(WriteFileDurably(Path("step_1/folder/c.txt"), "wOrds").ok());
  EXPECT_THAT(std::string(Verify(saved.path).message()), HasSubstr("folder/c.txt"));
  fs::remove_all(Path("step_1/folder"));
  EXPECT_EQ(Verify(saved.path).code(), absl::StatusCode::kDataLoss);
  fs::remove_all(Path("step_1"));
  EXPECT_EQ(save({"folder/inner/e.txt"}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(save({"folder/.hidden"}).status().code(), absl::StatusCode::kInternal);
}

// Programs that know version 2 alone would load a checkpoint without its folders.
TEST_F(CheckpointTest, AFolderGivesTheManifestAVersionThatOlderProgramsRefuse) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  EXPECT_THAT(ReadFile(Path("step_1/manifest.json")).value(), HasSubstr("\"version\": 2"));
  const auto saved =
      Save(parent_.string(), "step_2", {"trainer", 2}, [](const std::string& directory) {
        fs::create_directories(fs::path(directory) / "folder");
        return WriteFileDurably(absl::StrCat(directory, "/folder/a.txt"), "words");
      });
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(Verify(saved->path).ok());
  std::string text = ReadFile(Path("step_2/manifest.json")).value();
  EXPECT_THAT(text, HasSubstr("\"version\": 3"));
  // Written before folders had a version of their own.
  text.replace(text.find("\"version\": 3"), 12, "\"version\": 2");
  ASSERT_TRUE(WriteFileDurably(Path("step_2/manifest.json"), text).ok());
  EXPECT_TRUE(Verify(saved->path).ok());
  text.replace(text.find("\"version\": 2"), 12, "\"version\": 4");
  ASSERT_TRUE(WriteFileDurably(Path("step_2/manifest.json"), text).ok());
  EXPECT_TRUE(absl::IsDataLoss(Verify(saved->path)));
}

TEST_F(CheckpointTest, EveryDamageOfTheManifestIsDetectedOrHarmless) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  const std::string path = Path("step_1/manifest.json");
  const std::string good = ReadFile(path).value();
  for (size_t length = 0; length + 2 < good.size(); ++length) {
    std::ofstream(path, std::ios::binary) << good.substr(0, length);
    EXPECT_EQ(Verify(Path("step_1")).code(), absl::StatusCode::kDataLoss) << length;
  }
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x40);
    std::ofstream(path, std::ios::binary) << bad;
    const absl::Status status = Verify(Path("step_1"));
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDataLoss) << status;
  }
}

TEST_F(CheckpointTest, ManifestCannotReachOutsideItsDirectory) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  ASSERT_TRUE(WriteFileDurably(Path("step_1/manifest.json"),
                               R"({"format":"tandem-checkpoint","version":2,"kind":"trainer",
                                  "step":1,"files":[{"name":"../x","bytes":0,"xxh3_128":""}]})")
                  .ok());
  EXPECT_EQ(Verify(Path("step_1")).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, FailedSaveLeavesNothing) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  const auto failing =
      Save(parent_.string(), "step_2", {"trainer", 2}, [](const std::string& directory) {
        WriteFileDurably(directory + "/part", "x").IgnoreError();
        return absl::ResourceExhaustedError("no space");
      });
  EXPECT_EQ(failing.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Entries(), 1);
}

// The writer is a process of its own, which is killed.
TEST_F(CheckpointTest, WhatAKilledSaveLeavesIsRemovedByTheNextOneAndNotBefore) {
  int begun[2];
  ASSERT_EQ(pipe(begun), 0);
  const pid_t writer = fork();
  if (writer == 0) {
    (void)Save(parent_.string(), "step_1", {"trainer", 1}, [&](const std::string& directory) {
      WriteFileDurably(directory + "/model.safetensors", "half").IgnoreError();
      if (write(begun[1], "x", 1) == 1) pause();
      return absl::OkStatus();
    });
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(begun[0], &byte, 1), 1);
  EXPECT_TRUE(Listed().empty());
  ASSERT_TRUE(SaveStep("step_2").ok());  // nobody may touch what a live writer writes
  EXPECT_EQ(Entries(), 2);
  kill(writer, SIGKILL);
  waitpid(writer, nullptr, 0);
  ASSERT_TRUE(SaveStep("step_3").ok());
  EXPECT_EQ(Entries(), 2);
  EXPECT_THAT(Listed(), ElementsAre("step_2", "step_3"));
  close(begun[0]);
  close(begun[1]);
}

TEST_F(CheckpointTest, TwoSavesOfOneNameDoNotDisturbEachOther) {
  const auto outer =
      Save(parent_.string(), "step_1", {"trainer", 1}, [&](const std::string& directory) {
        EXPECT_TRUE(SaveStep("step_1", "inner").ok());
        return WriteFileDurably(directory + "/model.safetensors", "outer");
      });
  ASSERT_TRUE(outer.ok()) << outer.status();
  EXPECT_TRUE(Verify(Path("step_1")).ok());
  EXPECT_EQ(ReadFile(Path("step_1/model.safetensors")).value(), "outer");
  EXPECT_EQ(Entries(), 1);
}

TEST_F(CheckpointTest, ServersThatSaveIntoOneDirectoryLeaveEachOthersAlone) {
  std::vector<std::thread> servers;
  for (const std::string kind : {"trainer", "critic"}) {
    servers.emplace_back([this, kind] {
      for (int step = 0; step < 500; ++step) {
        const auto saved = SaveStep(kind + std::to_string(step % 2), "weights", {kind, step});
        ASSERT_TRUE(saved.ok()) << saved.status();
        ASSERT_TRUE(Verify(saved->path).ok()) << Verify(saved->path);
        ASSERT_TRUE(Prune(saved->path, {.kind = kind}, 1).ok());
      }
    });
  }
  for (std::thread& server : servers) server.join();
}

TEST_F(CheckpointTest, HalfAPruneIsRemovedByTheNextSave) {
  fs::create_directories(parent_ / ".tandem-tmp-999999-0-step_7");
  ASSERT_TRUE(WriteFileDurably(Path(".tandem-tmp-999999-0-step_7/state.json"), "{}").ok());
  ASSERT_TRUE(SaveStep("step_1").ok());
  EXPECT_EQ(Entries(), 1);
}

TEST_F(CheckpointTest, AFileInTheWayOfTheDirectoryIsNamed) {
  fs::create_directories(parent_);
  ASSERT_TRUE(WriteFileDurably(Path("file"), "x").ok());
  const absl::Status status = Save(Path("file"), "step_1", {"trainer", 1}, [](const auto&) {
                                return absl::OkStatus();
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(FieldPath(status), "directory");
}

TEST_F(CheckpointTest, SavingAgainReplacesAtomically) {
  ASSERT_TRUE(SaveStep("step_1", "old").ok());
  ASSERT_TRUE(SaveStep("step_1", "newer").ok());
  EXPECT_TRUE(Verify(Path("step_1")).ok());
  EXPECT_EQ(ReadFile(Path("step_1/model.safetensors")).value(), "newer");
  EXPECT_EQ(Entries(), 1);
}

TEST_F(CheckpointTest, WhatOtherProgramsHideStays) {
  for (const char* name : {".tmp-999999-s-1", ".hidden", "tandem-tmp-1-0-s"}) {
    fs::create_directories(parent_ / name);
  }
  ASSERT_TRUE(SaveStep("s").ok());
  EXPECT_EQ(Entries(), 4);
}

TEST_F(CheckpointTest, ACrashInAReplacementIsUndone) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  fs::rename(Path("step_1"), Path(".tandem-old-step_1"));
  EXPECT_TRUE(Verify(Path("step_1")).ok());
}

TEST_F(CheckpointTest, LoadingAndSavingLeaveForeignFoldersAlone) {
  ASSERT_TRUE(SaveStep("s1").ok());
  for (const char* folder : {".old-s1", ".old-exp", ".tandem-old-s1", ".tandem-old-exp",
                             ".tandem-tmp-notes", ".tandem-tmp-1-notes"}) {
    fs::create_directories(parent_ / folder);
    ASSERT_TRUE(WriteFileDurably(Path(folder) + "/thesis.txt", "x").ok());
  }
  EXPECT_TRUE(Verify(Path("s1")).ok());
  EXPECT_EQ(Verify(Path("exp")).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(SaveStep("s1").ok());
  for (const char* folder : {".old-s1", ".old-exp", ".tandem-old-s1", ".tandem-old-exp",
                             ".tandem-tmp-notes", ".tandem-tmp-1-notes"}) {
    EXPECT_TRUE(fs::exists(parent_ / folder / "thesis.txt")) << folder;
  }
  EXPECT_FALSE(fs::exists(parent_ / "exp"));
}

TEST_F(CheckpointTest, ACheckpointWithAForeignFileIsNotReplaced) {
  ASSERT_TRUE(SaveStep("step_1", "old").ok());
  ASSERT_TRUE(WriteFileDurably(Path("step_1/notes.txt"), "x").ok());
  const absl::Status status = SaveStep("step_1", "new").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(FieldPath(status), "name");
  EXPECT_THAT(std::string(status.message()), HasSubstr("notes.txt"));
  EXPECT_EQ(ReadFile(Path("step_1/model.safetensors")).value(), "old");
  EXPECT_EQ(ReadFile(Path("step_1/notes.txt")).value(), "x");
}

TEST_F(CheckpointTest, AForeignFileThatComesDuringTheSaveIsNotLost) {
  ASSERT_TRUE(SaveStep("step_1", "old").ok());
  const auto saved =
      Save(parent_.string(), "step_1", {"trainer", 1}, [&](const std::string& directory) {
        WriteFileDurably(Path("step_1/notes.txt"), "x").IgnoreError();
        return WriteFileDurably(directory + "/model.safetensors", "new");
      });
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kFailedPrecondition) << saved.status();
  EXPECT_TRUE(fs::exists(Path("step_1/notes.txt")));
  EXPECT_EQ(Entries(), 1);
}

TEST_F(CheckpointTest, ACopyIsNotReplaced) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  fs::copy(Path("step_1"), Path("best"), fs::copy_options::recursive);
  const absl::Status status = SaveStep("best").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'step_1'"));
  EXPECT_TRUE(Verify(Path("best")).ok());  // it loads
}

TEST_F(CheckpointTest, NothingButACheckpointOfItsKindIsReplaced) {
  ASSERT_TRUE(SaveStep("critic_1", "w", {"critic", 1}).ok());
  fs::create_directories(parent_ / "notes");
  fs::create_directory_symlink(parent_ / "critic_1", parent_ / "link");
  ASSERT_TRUE(WriteFileDurably(Path("file"), "x").ok());
  for (const char* name : {"critic_1", "notes", "link", "file"}) {
    EXPECT_EQ(SaveStep(name).status().code(), absl::StatusCode::kAlreadyExists) << name;
    EXPECT_TRUE(fs::exists(parent_ / name));
  }
  EXPECT_TRUE(Verify(Path("critic_1")).ok());
}

TEST_F(CheckpointTest, PruneGoesByTheStepAndNotByTheName) {
  ASSERT_TRUE(SaveStep("best", "w", {"trainer", 11}).ok());
  ASSERT_TRUE(SaveStep("step_9", "w", {"trainer", 9}).ok());
  ASSERT_TRUE(SaveStep("step_10", "w", {"trainer", 10}).ok());
  EXPECT_THAT(Listed(), ElementsAre("step_9", "step_10", "best"));
  ASSERT_TRUE(Prune(Path("best"), {.kind = "trainer"}, 2).ok());
  EXPECT_THAT(Listed(), ElementsAre("step_10", "best"));
  EXPECT_EQ(Entries(), 2);
  ASSERT_TRUE(Prune(Path("best"), {.kind = "trainer"}, 0).ok());
  EXPECT_THAT(Listed(), ElementsAre("step_10", "best"));
}

TEST_F(CheckpointTest, PruneSparesWhatWasJustSavedAndOtherKinds) {
  ASSERT_TRUE(SaveStep("again_1", "w", {"trainer", 1}).ok());
  ASSERT_TRUE(SaveStep("value", "w", {"critic", 0}).ok());
  ASSERT_TRUE(SaveStep("step_20", "w", {"trainer", 20}).ok());
  ASSERT_TRUE(SaveStep("step_30", "w", {"trainer", 30}).ok());
  ASSERT_TRUE(Prune(Path("again_1"), {.kind = "trainer"}, 2).ok());
  EXPECT_THAT(Listed(), ElementsAre("value", "again_1", "step_30"));
}

TEST_F(CheckpointTest, PruneLeavesWhatIsNotOfTheRunOrWasChanged) {
  ASSERT_TRUE(SaveStep("step_1", "w", {"trainer", 1, "run"}).ok());
  ASSERT_TRUE(SaveStep("step_2", "w", {"trainer", 2, "run"}).ok());
  ASSERT_TRUE(SaveStep("step_3", "w", {"trainer", 3, "run"}).ok());
  ASSERT_TRUE(SaveStep("other", "w", {"trainer", 1, "other"}).ok());
  fs::copy(Path("step_1"), Path("best"), fs::copy_options::recursive);
  ASSERT_TRUE(WriteFileDurably(Path("step_2/notes.txt"), "x").ok());
  ASSERT_TRUE(Prune(Path("step_3"), {"trainer", 3, "run"}, 1).ok());
  EXPECT_FALSE(fs::exists(Path("step_1")));
  EXPECT_TRUE(Verify(Path("best")).ok());
  EXPECT_TRUE(Verify(Path("other")).ok());
  EXPECT_TRUE(fs::exists(Path("step_2/notes.txt")));
  EXPECT_TRUE(fs::exists(Path("step_2/model.safetensors")));
}

TEST_F(CheckpointTest, PruneSparesWhatIsInUse) {
  for (int step = 1; step <= 5; ++step) {
    ASSERT_TRUE(Save(parent_.string(), absl::StrCat("step_", step), {"trainer", step},
                     [](const std::string& directory) {
                       return WriteFileDurably(absl::StrCat(directory, "/a.txt"), "words");
                     })
                    .ok());
  }
  const std::vector<std::string> in_use = {Path("step_1") + "/", Path("step_2/speculator"),
                                           Path("step_5/../step_4"), Path("step"), ""};
  ASSERT_TRUE(Prune(Path("step_5"), {.kind = "trainer"}, 1, in_use).ok());
  for (int step = 1; step <= 5; ++step) {
    EXPECT_EQ(fs::exists(Path(absl::StrCat("step_", step))), step != 3) << step;
  }
}

TEST_F(CheckpointTest, PruneFollowsNoLink) {
  const fs::path archive = parent_ / "archive";
  ASSERT_TRUE(SaveStep("step_5", "w", {"trainer", 5}).ok());
  fs::create_directory(archive);
  fs::rename(parent_ / "step_5", archive / "step_5");
  fs::create_directory_symlink(archive / "step_5", parent_ / "step_5");
  ASSERT_TRUE(SaveStep("step_6", "w", {"trainer", 6}).ok());
  ASSERT_TRUE(Prune(Path("step_6"), {.kind = "trainer"}, 1).ok());
  EXPECT_TRUE(Verify((archive / "step_5").string()).ok());
}

TEST_F(CheckpointTest, NameMustBePlain) {
  for (const char* name : {"", ".", "..", "a/b", "../x", ".hidden"}) {
    EXPECT_EQ(SaveStep(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

}  // namespace
}  // namespace tandem::checkpoint
