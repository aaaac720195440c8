#include "services/rollout/engine/options_check.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "services/rollout/engine/testing/tiny_options.h"

namespace tandem::rollout {
namespace {

constexpr char kCommit[] = "0123456789abcdef0123456789abcdef01234567";

struct BadOptions {
  const char* path;
  std::function<void(EngineOptions&)> change;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST(CheckOptionsTest, ErrorsNameTheSetting) {
  EXPECT_TRUE(CheckOptions(TinyOptions("/models")).ok());
  const BadOptions all[] = {
      {"senior.model", [](EngineOptions& options) { options.senior.model = ""; }},
      {"max_num_seqs", [](EngineOptions& options) { options.max_num_seqs = 0; }},
      {"max_batched_tokens", [](EngineOptions& options) { options.max_batched_tokens = 0; }},
      {"max_queue", [](EngineOptions& options) { options.max_queue = 0; }},
      {"senior.max_model_len", [](EngineOptions& options) { options.senior.max_model_len = 1; }},
      {"junior.max_model_len", [](EngineOptions& options) { options.junior.max_model_len = 1; }},
      {"compute.num_threads", [](EngineOptions& options) { options.compute.num_threads = -1; }},
      {"junior.quantization",
       [](EngineOptions& options) {
         options.junior.quantization = Quantization::kInt8;
         options.compute.kernels = "aten";
       },
       absl::StatusCode::kUnimplemented}};
  for (const BadOptions& bad : all) {
    EngineOptions options = TinyOptions("/models");
    bad.change(options);
    const absl::Status status = CheckOptions(options);
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_EQ(FieldPath(status), bad.path) << status;
  }
}

TEST(CheckOptionsTest, SettingsOfAJuniorThatThereIsNotAreNotChecked) {
  EngineOptions options = TinyOptions("/models");
  options.junior = {.model = "",
                    .dtype = DType::kFloat32,
                    .quantization = Quantization::kNone,
                    .max_model_len = 0};
  EXPECT_TRUE(CheckOptions(options).ok());
}

TEST(CheckOptionsTest, SharesOfOneGpuAreAtMostAllOfIt) {
  EngineOptions options = TinyOptions("/models");
  options.senior.gpu_memory_utilization = 0.7;
  options.junior.gpu_memory_utilization = 0.3;
  EXPECT_TRUE(CheckOptions(options).ok());
  options.junior.gpu_memory_utilization = 0.31;
  const absl::Status status = CheckOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "junior.gpu_memory_utilization");
  // One lane has what is free.
  options.senior.gpu_memory_utilization = std::nullopt;
  EXPECT_TRUE(CheckOptions(options).ok());
}

// Two machines of two ranks each: the senior is on ranks 0 to 2, the junior on ranks 0 and 1.
TEST(CheckOptionsTest, SharesOfDifferentGpusDoNotAddUp) {
  EngineOptions options = TinyOptions("/models");
  options.senior.gpu_memory_utilization = options.junior.gpu_memory_utilization = 0.9;
  options.environment = {.world_size = 4, .local_world_size = 2};
  options.layout = {.tensor_parallel_size = 3, .junior_tensor_parallel_size = 2};
  const auto shares = [&](std::vector<int32_t> devices) {
    options.layout.junior_gpu_devices = std::move(devices);
    return !CheckOptions(options).ok();
  };
  EXPECT_TRUE(shares({}));
  EXPECT_FALSE(shares({2, 3}));
  EXPECT_TRUE(shares({2, 1})) << "of the same rank";
  EXPECT_TRUE(shares({1, 3})) << "of another rank";
  options.environment.local_world_size = 4;
  EXPECT_TRUE(shares({3, 2}));
  EXPECT_FALSE(shares({3, 4})) << "of a rank without the senior, and of no rank";
}

TEST(CheckOptionsTest, SharesOfRanksOnOneGpuAddUp) {
  EngineOptions options = TinyOptions("/models");
  options.environment = {.world_size = 3, .local_world_size = 3};
  options.layout = {.tensor_parallel_size = 3, .junior_tensor_parallel_size = 1};
  options.compute.ranks_per_gpu = 2;
  options.senior.gpu_memory_utilization = 0.4;
  options.junior.gpu_memory_utilization = 0.2;
  EXPECT_TRUE(CheckOptions(options).ok()) << CheckOptions(options);
  options.junior.gpu_memory_utilization = 0.21;
  EXPECT_EQ(FieldPath(CheckOptions(options)), "junior.gpu_memory_utilization");
  options.compute.ranks_per_gpu = 1;
  EXPECT_TRUE(CheckOptions(options).ok()) << "a GPU each";
  options.compute.ranks_per_gpu = 3;
  options.junior.gpu_memory_utilization = std::nullopt;
  EXPECT_EQ(FieldPath(CheckOptions(options)), "senior.gpu_memory_utilization");
}

class RevisionTest : public ::testing::Test {
 protected:
  RevisionTest() : repository_(testing::TempDir() + "models--acme--tiny") {
    std::filesystem::create_directories(Snapshot());
  }
  ~RevisionTest() override { std::filesystem::remove_all(repository_); }
  std::string Snapshot() const { return repository_ + "/snapshots/" + kCommit; }

  const std::string repository_;
};

TEST_F(RevisionTest, TheSnapshotOfTheCommitIsAccepted) {
  const std::string link = repository_ + "/link";
  std::filesystem::create_directory_symlink(Snapshot(), link);
  for (const std::string& directory : {Snapshot(), Snapshot() + "/", link}) {
    EngineOptions options = TinyOptions("/models");
    options.senior.model = options.junior.model = directory;
    options.senior.model_revision = options.junior.model_revision = kCommit;
    EXPECT_TRUE(CheckOptions(options).ok()) << CheckOptions(options);
  }
}

TEST_F(RevisionTest, AnotherDirectoryIsRefused) {
  const std::string other = "89abcdef0123456789abcdef0123456789abcdef";
  EngineOptions options = TinyOptions("/models");
  options.senior.model = Snapshot();
  options.senior.model_revision = other;
  absl::Status status = CheckOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(status), "senior.model_revision");
  EXPECT_NE(status.message().find(Snapshot() + " is not the snapshot of " + other),
            std::string::npos)
      << status;

  options = TinyOptions("/models");
  options.junior.model = repository_;  // the right repository, and no snapshot of it
  options.junior.model_revision = kCommit;
  status = CheckOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(status), "junior.model_revision");
}

}  // namespace
}  // namespace tandem::rollout
