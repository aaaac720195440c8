#include "common/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "common/base/atomic_file.h"
#include "common/base/status_macros.h"

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

  absl::StatusOr<Saved> SaveStep(const std::string& name, const std::string& weights = "weights") {
    return Save(parent_.string(), name, [&](const std::string& directory) -> absl::Status {
      TANDEM_RETURN_IF_ERROR(WriteFileDurably(directory + "/model.safetensors", weights));
      return WriteFileDurably(directory + "/state.json", "{}");
    });
  }
  std::string Path(const std::string& name) const { return (parent_ / name).string(); }

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
                               R"({"format":"tandem-checkpoint","version":1,"files":[
                                  {"name":"../x","bytes":0,"xxh3_128":""}]})")
                  .ok());
  EXPECT_EQ(Verify(Path("step_1")).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, FailedSaveLeavesNothing) {
  ASSERT_TRUE(SaveStep("step_1").ok());
  const auto failing = Save(parent_.string(), "step_2", [](const std::string& directory) {
    WriteFileDurably(directory + "/part", "x").IgnoreError();
    return absl::ResourceExhaustedError("no space");
  });
  EXPECT_EQ(failing.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
}

TEST_F(CheckpointTest, LeftOverOfACrashIsNoCheckpointAndIsRemoved) {
  // What a kill in the middle of a save leaves: a temporary folder, perhaps even with files.
  fs::create_directories(parent_ / ".tmp-step_1-999999");
  ASSERT_TRUE(WriteFileDurably(Path(".tmp-step_1-999999/model.safetensors"), "half").ok());
  EXPECT_TRUE(List(parent_.string()).empty());
  ASSERT_TRUE(SaveStep("step_1").ok());
  EXPECT_FALSE(fs::exists(parent_ / ".tmp-step_1-999999"));
}

TEST_F(CheckpointTest, SavingAgainReplacesAtomically) {
  ASSERT_TRUE(SaveStep("step_1", "old").ok());
  ASSERT_TRUE(SaveStep("step_1", "newer").ok());
  EXPECT_TRUE(Verify(Path("step_1")).ok());
  EXPECT_EQ(ReadFile(Path("step_1/model.safetensors")).value(), "newer");
  EXPECT_EQ(std::distance(fs::directory_iterator(parent_), {}), 1);
}

TEST_F(CheckpointTest, PruneKeepsTheNewest) {
  for (const char* name : {"step_9", "step_10", "step_11"}) ASSERT_TRUE(SaveStep(name).ok());
  const auto all = [](const std::string&) { return true; };
  ASSERT_TRUE(Prune(parent_.string(), 2, Path("step_11"), all).ok());
  EXPECT_THAT(List(parent_.string()), ElementsAre(Path("step_10"), Path("step_11")));
  ASSERT_TRUE(Prune(parent_.string(), 0, Path("step_11"), all).ok());
  EXPECT_EQ(List(parent_.string()).size(), 2u);
}

TEST_F(CheckpointTest, PruneSparesWhatWasJustSavedAndWhatIsNotOurs) {
  for (const char* name : {"final", "other_1", "step_20", "step_30"}) {
    ASSERT_TRUE(SaveStep(name).ok());
  }
  const auto ours = [&](const std::string& path) { return path != Path("other_1"); };
  ASSERT_TRUE(Prune(parent_.string(), 2, Path("final"), ours).ok());
  EXPECT_THAT(List(parent_.string()), ElementsAre(Path("final"), Path("other_1"), Path("step_30")));
}

TEST_F(CheckpointTest, NameMustBePlain) {
  for (const char* name : {"", ".", "..", "a/b", "../x", ".hidden"}) {
    EXPECT_EQ(SaveStep(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

}  // namespace
}  // namespace tandem::checkpoint
