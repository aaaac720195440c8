#include "services/rollout/engine/options_check.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>

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
