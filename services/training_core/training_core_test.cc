#include "services/training_core/training_core.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/checksum.h"
#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/base/steady_time.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/single_strategy.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/testing/read_named_tensors.h"
#include "services/training_core/service/testing/resolved_options.h"

namespace tandem::training {
namespace {

// A strategy that throws where a test tells it to.
class FailingStrategy final : public parallel::SingleStrategy {
 public:
  absl::StatusOr<parallel::OptimizerReport> OptimizerStep(
      const OptimizerOverrides& overrides) override {
    if (std::exchange(fail_before_update, false)) throw std::runtime_error("before the update");
    if (std::exchange(break_off, false)) return absl::DataLossError("in the update");
    if (std::exchange(not_finite, false)) return NotFiniteError("the gradient");
    auto report = SingleStrategy::OptimizerStep(overrides);
    if (std::exchange(fail_after_update, false)) throw std::runtime_error("after the update");
    return report;
  }
  int64_t optimizer_steps() const override {
    // The core calls this before and after an update, then for the info that it publishes.
    if (fail_publishing > 0 && --fail_publishing == 0) throw std::runtime_error("publishing");
    return SingleStrategy::optimizer_steps();
  }
  absl::Status LoadParameters(const NamedTensors& parameters) override {
    if (std::exchange(fail_load, false)) throw std::runtime_error("while loading");
    return SingleStrategy::LoadParameters(parameters);
  }
  absl::StatusOr<parallel::OptimizerWriter> CopyOptimizer(TensorCopies& copies) override {
    absl::StatusOr<parallel::OptimizerWriter> copied = SingleStrategy::CopyOptimizer(copies);
    if (!copied.ok() || before_write == nullptr) return copied;
    return [before = before_write, write = *copied](const std::string& directory) {
      const absl::Status status = before();
      return status.ok() ? write(directory) : status;
    };
  }
  std::function<absl::Status()> before_write;  // of the optimizer's copy, on the writer's thread
  bool fail_load = false;
  bool fail_before_update = false;
  bool break_off = false;
  bool not_finite = false;
  bool fail_after_update = false;
  mutable int fail_publishing = 0;  // at this call of optimizer_steps
};

// Counts its calls, and fails where a test tells it to.
class CountingCompanion final : public Companion {
 public:
  absl::Status Update() override {
    ++count;
    if (std::exchange(fail_update, false)) throw std::runtime_error("beside the model");
    return absl::OkStatus();
  }
  absl::Status Save(const std::string& directory) override { return Write(directory, count); }
  absl::StatusOr<CompanionWriter> Copy(TensorCopies&) override {
    if (std::exchange(fail_copy, false)) throw std::runtime_error("no memory");
    return CompanionWriter([this, copied = count](const std::string& directory) {
      if (before_write != nullptr) before_write();
      return Write(directory, copied);
    });
  }
  static absl::Status Write(const std::string& directory, int updates) {
    std::filesystem::create_directory(directory + "/companion");
    return WriteFileDurably(directory + "/companion/updates.txt", absl::StrCat(updates));
  }
  int64_t updates() const override { return count; }
  absl::Status ReadCheckpoint(const LoadRequest& request, bool intact) override {
    read_intact = intact;
    read_optimizer = request.optimizer;
    std::ifstream(request.path + "/companion/updates.txt") >> read;
    return refuse_read ? absl::DataLossError("is damaged") : absl::OkStatus();
  }
  absl::Status ReadInitial() override {
    read = 0;
    return absl::OkStatus();
  }
  std::string initial_directory() const override { return initial; }
  void Adopt() override {
    if (std::exchange(fail_adopt, false)) throw std::runtime_error("beside the model");
    count = read;
  }

  int count = 0, read = -1;
  bool read_intact = true;
  OptimizerState read_optimizer = OptimizerState::kKeep;
  std::string initial;
  bool fail_update = false, refuse_read = false, fail_adopt = false, fail_copy = false;
  std::function<void()> before_write;  // of a copy, on the writer's thread
};

class TrainingCoreTest : public ::testing::Test {
 protected:
  TrainingCoreTest() {
    WriteTinyModel(folder_ / "model", /*seed=*/3);
    core_ = Make();
  }

  std::unique_ptr<TrainingCore> Make() {
    TrainingOptions options;
    SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
    options.optimizer.learning_rate = 1e-2;
    if (change_options != nullptr) change_options(options);
    auto strategy = std::make_unique<FailingStrategy>();
    strategy_ = strategy.get();
    std::unique_ptr<TrainingCore> core =
        std::move(TrainingCore::Create("trainer", "policy/", options,
                                       {.head = HeadKind::kLm, .requires_grad = true},
                                       std::move(strategy)))
            .value();
    train_step_ = core->AddCommand<StepIdentity, absl::StatusOr<StepResult>>(
        "train step", [this, made = core.get()](const CallScope&, const StepIdentity& identity) {
          using Updates = std::vector<TrainingCore::UpdateGradients>;
          return made->Step(identity, [&](StepReport&) -> absl::StatusOr<Updates> {
            return Updates(updates_, [&](StepReport& report) { return AddGradients(report); });
          });
        });
    weights_ = core->AddCommand<std::string, absl::StatusOr<WeightsVersion>>(
        "test", [made = core.get()](const CallScope&, const std::string&) {
          return absl::StatusOr<WeightsVersion>(made->weights());
        });
    core->SetCompanion(&companion_);
    core->Start();
    return core;
  }

  static StepIdentity Identity(int64_t step = 0) {
    return {.run_id = "run",
            .step = step,
            .request_id = std::to_string(step),
            .payload_digest = "payload",
            .expected_version = step};
  }
  // Makes a step of `updates` updates, each on the sum of all hidden states.
  absl::StatusOr<StepResult> Step(const StepIdentity& identity, const CallScope& call = {},
                                  size_t updates = 1) {
    updates_ = updates;
    return train_step_(call, identity);
  }
  absl::Status AddGradients(StepReport& report) {
    if (before_gradients != nullptr) before_gradients();
    report.metrics["loss/total"] = 0.5;
    const SequenceBatch rows(std::vector<SequenceRows>(
        sequences_, SelectSequenceRows({1, 2}, {3, 4, 5}, [](size_t) { return true; })));
    return core_
        ->ForwardBackward(rows, rows.all(),
                          [&](const MicroBatchInput&, const at::Tensor& hidden) {
                            const EngineInfo info = core_->Info();
                            passes_.emplace_back(info.micro_batches_done, info.micro_batches);
                            return absl::StatusOr<at::Tensor>(at::ones_like(hidden));
                          })
        .status();
  }

  std::function<void(TrainingOptions& options)> change_options;  // of what Make makes
  std::function<void()> before_gradients;
  size_t updates_ = 1, sequences_ = 1;
  std::vector<std::pair<int64_t, int64_t>> passes_;  // micro-batches done and in all, in each loss
  TrainingCore::Command<StepIdentity, absl::StatusOr<StepResult>> train_step_;
  TrainingCore::Command<std::string, absl::StatusOr<WeightsVersion>> weights_;
  TemporaryFolder folder_;
  CountingCompanion companion_;  // outlives the core
  std::unique_ptr<TrainingCore> core_;
  FailingStrategy* strategy_ = nullptr;  // of core_
};

TEST_F(TrainingCoreTest, TheInfoSaysHowFarAPassIs) {
  change_options = [](TrainingOptions& options) { options.micro_batch_tokens = 8; };
  core_ = Make();
  sequences_ = 5;  // of four tokens each
  ASSERT_TRUE(Step(Identity(0), {}, /*updates=*/2).ok());
  using Counts = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(passes_, (Counts{{0, 3}, {1, 3}, {2, 3}, {0, 3}, {1, 3}, {2, 3}}));
  EXPECT_EQ(core_->Info().micro_batches, 0);
}

// The companion's update is made if and only if the model's is.
TEST_F(TrainingCoreTest, TheCompanionLearnsWhatTheModelLearns) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  EXPECT_EQ(companion_.count, 1);
  EXPECT_TRUE(Step(Identity(0))->replayed);
  EXPECT_EQ(companion_.count, 1);
  ASSERT_TRUE(Step(Identity(1), {}, /*updates=*/3).ok());
  EXPECT_EQ(companion_.count, 4);
  strategy_->not_finite = true;
  EXPECT_TRUE(Step(Identity(2))->report.skipped);
  strategy_->fail_before_update = true;
  StepIdentity next = Identity(2);
  next.request_id = next.payload_digest = "next";
  next.step = 3;
  EXPECT_FALSE(Step(next).ok());
  EXPECT_EQ(companion_.count, 4);
  strategy_->fail_after_update = true;
  EXPECT_TRUE(Step(next).ok());
  EXPECT_EQ(companion_.count, 5);
}

TEST_F(TrainingCoreTest, ACompanionsUpdateThatBreaksOffNeedsACheckpoint) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const auto saved =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "one"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  companion_.fail_update = true;
  EXPECT_TRUE(absl::IsDataLoss(Step(Identity(1)).status()));
  EXPECT_TRUE(absl::IsDataLoss(Step(Identity(2)).status()));
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved->path}).ok());
  EXPECT_EQ(companion_.count, 1);
  EXPECT_TRUE(Step(Identity(1)).ok());
  ASSERT_TRUE(core_->LoadBaseModel({}).ok());
  EXPECT_EQ(companion_.count, 0);
}

// A checkpoint that has nothing of the companion must not bring back half an update.
TEST_F(TrainingCoreTest, TheCompanionKnowsWhetherItsStateIsIntact) {
  const std::string saved =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "one"})->path;
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved}).ok());
  EXPECT_TRUE(companion_.read_intact);
  companion_.fail_update = true;
  EXPECT_TRUE(absl::IsDataLoss(Step(Identity(0)).status()));
  companion_.refuse_read = true;
  EXPECT_FALSE(core_->LoadCheckpoint({}, {saved}).ok());
  companion_.refuse_read = false;
  companion_.fail_adopt = true;
  EXPECT_FALSE(core_->LoadCheckpoint({}, {saved}).ok());
  EXPECT_FALSE(companion_.read_intact);
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved}).ok());
  EXPECT_FALSE(companion_.read_intact);
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved}).ok());
  EXPECT_TRUE(companion_.read_intact);
}

TEST_F(TrainingCoreTest, PruningSparesWhatTheBaseModelIsReadFrom) {
  for (const char* name : {"one", "two", "three"}) {
    ASSERT_TRUE(
        core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = name, .keep = 2})
            .ok());
    companion_.initial = folder_ / "checkpoints/one/companion";
  }
  const auto there = [&](const char* name) {
    return std::filesystem::exists(folder_ / absl::StrCat("checkpoints/", name));
  };
  EXPECT_TRUE(there("one") && there("two") && there("three"));
  companion_.initial.clear();
  ASSERT_TRUE(
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "three", .keep = 2})
          .ok());
  EXPECT_FALSE(there("one") && there("two"));
}

TEST_F(TrainingCoreTest, WhatTheCompanionRefusesIsNotLoaded) {
  const auto saved =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "start"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_TRUE(Step(Identity(0)).ok());
  const std::string digest = core_->Info().weights.digest;
  companion_.refuse_read = true;
  EXPECT_TRUE(absl::IsDataLoss(core_->LoadCheckpoint({}, {saved->path})));
  EXPECT_EQ(core_->Info().weights.digest, digest);
  EXPECT_EQ(companion_.count, 1);
  EXPECT_TRUE(Step(Identity(1)).ok());
}

TEST_F(TrainingCoreTest, AFailureAfterTheUpdateDoesNotLoseTheReply) {
  const std::string before = core_->Info().weights.digest;
  strategy_->fail_publishing = 3;
  const absl::Status failed = Step(Identity()).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal) << failed;

  const absl::StatusOr<StepResult> repeat = Step(Identity());
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->replayed);
  EXPECT_EQ(repeat->report.weights, core_->Info().weights);
  EXPECT_EQ(repeat->report.weights.version, 1);
  EXPECT_NE(repeat->report.weights.digest, before);
  EXPECT_EQ(repeat->report.metrics.at("loss/total"), 0.5);
  EXPECT_GT(repeat->report.metrics.at("policy/grad_norm"), 0);

  // The result equals that of a step in which nothing failed.
  const StepResult next = Step(Identity(1)).value();
  core_ = Make();
  ASSERT_TRUE(Step(Identity()).ok());
  EXPECT_EQ(Step(Identity(1)).value().report, next.report);
}

TEST_F(TrainingCoreTest, AFailureOfTheStrategyAfterTheUpdateCountsTheStepOnce) {
  strategy_->fail_after_update = true;
  const absl::StatusOr<StepResult> first = Step(Identity());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->report.weights.version, 1);
  EXPECT_EQ(first->report.metrics.count("policy/grad_norm"), 0);  // it was lost with the error
  EXPECT_TRUE(core_->unsaved());
  const StepResult repeat = Step(Identity()).value();
  EXPECT_TRUE(repeat.replayed);
  EXPECT_EQ(repeat.report, first->report);
  EXPECT_EQ(strategy_->optimizer_steps(), 1);

  // The result equals that of a step in which nothing failed.
  const StepResult next = Step(Identity(1)).value();
  core_ = Make();
  EXPECT_EQ(Step(Identity()).value().report.weights, first->report.weights);
  EXPECT_EQ(Step(Identity(1)).value().report, next.report);
}

TEST_F(TrainingCoreTest, ADigestThatFailedIsThereForWhateverComesNext) {
  strategy_->fail_publishing = 3;
  EXPECT_FALSE(Step(Identity()).ok());
  const auto weights = weights_({}, "");
  EXPECT_EQ(weights->version, 1);
  EXPECT_NE(weights->digest, "");
}

// A schedule that ended in the checkpoint's run leaves the next run a rate of 0, unless that run
// begins a schedule of its own.
TEST_F(TrainingCoreTest, ACheckpointIsLoadedWithItsOptimizerOrWithAFreshOne) {
  change_options = [](TrainingOptions& options) {
    options.optimizer.schedule = LearningRateSchedule::kLinear;
    options.optimizer.total_steps = 2;
  };
  core_ = Make();
  const auto rate = [](const StepResult& step) {
    return step.report.metrics.at("policy/learning_rate");
  };
  const double first_rate = rate(Step(Identity(0)).value());
  ASSERT_TRUE(Step(Identity(1)).ok());
  const WeightsVersion saved = core_->Info().weights;
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "two"})->path;

  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_EQ(companion_.read_optimizer, OptimizerState::kKeep);
  EXPECT_EQ(core_->Info().optimizer_steps, 2);
  const StepResult ended = Step(Identity(2)).value();
  EXPECT_EQ(rate(ended), 0);
  EXPECT_EQ(ended.report.weights.digest, saved.digest);

  const LoadRequest fresh = {.path = path, .optimizer = OptimizerState::kFresh};
  ASSERT_TRUE(core_->LoadCheckpoint({}, fresh).ok());
  EXPECT_EQ(companion_.read_optimizer, OptimizerState::kFresh);
  EXPECT_EQ(core_->Info().weights, saved);  // their number goes on
  EXPECT_EQ(core_->Info().optimizer_steps, 0);
  const StepResult begun = Step(Identity(2)).value();
  EXPECT_EQ(rate(begun), first_rate);
  EXPECT_NE(begun.report.weights.digest, saved.digest);

  // The moments are fresh, too: those of a model that was started from the weights.
  ASSERT_TRUE(core_->LoadCheckpoint({}, fresh).ok());
  const std::string exported = folder_ / "exported";
  ASSERT_TRUE(core_->ExportModel({}, exported, DType::kFloat32).ok());
  change_options = [&, change = change_options](TrainingOptions& options) {
    change(options);
    options.model = exported;
  };
  core_ = Make();
  EXPECT_EQ(Step(Identity(0)).value().report.weights.digest, begun.report.weights.digest);
}

TEST_F(TrainingCoreTest, AFreshOptimizerNeedsNoStateInTheCheckpoint) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "one"})->path;
  // The moments in the file are of other parameters than those that train now.
  change_options = [](TrainingOptions& options) { options.freeze = {"model.embed_tokens.*"}; };
  core_ = Make();
  EXPECT_TRUE(absl::IsDataLoss(core_->LoadCheckpoint({}, {path})));
  EXPECT_TRUE(core_->LoadCheckpoint({}, {.path = path, .optimizer = OptimizerState::kFresh}).ok());
  EXPECT_TRUE(Step(Identity(1)).ok());
}

TEST_F(TrainingCoreTest, AnotherVersionThanTheExpectedOneIsNotSaved) {
  const std::string directory = folder_ / "checkpoints";
  ASSERT_TRUE(Step(Identity(0)).ok());
  SaveRequest save = {.directory = directory, .name = "one", .expected_version = 1};
  const std::string path = core_->SaveCheckpoint({}, save).value().path;
  // As a trainer that was restarted.
  ASSERT_TRUE(core_->LoadBaseModel({}).ok());
  const absl::Status refused = core_->SaveCheckpoint({}, save).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(refused), "expected_version");
  save.expected_version = 0;
  save.name = "zero";
  EXPECT_TRUE(core_->SaveCheckpoint({}, save).ok());
  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_EQ(core_->Info().weights.version, 1);
}

// Checkpoints in the background; the writer waits until `write_` is set.
class BackgroundSaveTest : public TrainingCoreTest {
 protected:
  BackgroundSaveTest() {
    strategy_->before_write = [wait = written_, this]() {
      wait.wait();
      return outcome_;
    };
  }
  ~BackgroundSaveTest() override {
    Write();
    core_ = nullptr;  // its writer uses the members
  }

  // Lets the writer go on, to fail with `outcome` unless it is OK.
  void Write(absl::Status outcome = absl::OkStatus()) {
    if (std::exchange(released_, true)) return;
    outcome_ = std::move(outcome);
    write_.set_value();
  }
  SaveRequest Request(int64_t version, bool in_background) const {
    return {.directory = folder_ / "checkpoints",
            .name = absl::StrCat("step_", version),
            .expected_version = version,
            .in_background = in_background};
  }
  bool Exists(int64_t version) const {
    return std::filesystem::exists(folder_ / absl::StrCat("checkpoints/step_", version));
  }

  std::promise<void> write_;
  std::shared_future<void> written_ = write_.get_future().share();
  absl::Status outcome_;
  bool released_ = false;
};

TEST_F(BackgroundSaveTest, StepsRunWhileACheckpointIsWritten) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const WeightsVersion saved_weights = core_->Info().weights;
  const auto begun = core_->SaveCheckpoint({}, Request(1, true));
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_TRUE(begun->pending);
  // Asked again, it is the same save.
  EXPECT_TRUE(core_->SaveCheckpoint({}, Request(1, true))->pending);
  ASSERT_TRUE(Step(Identity(1)).ok());
  ASSERT_TRUE(Step(Identity(2)).ok());
  EXPECT_FALSE(Exists(1));
  EXPECT_TRUE(core_->unsaved());
  Write();
  const auto saved = core_->SaveCheckpoint({}, Request(1, false));
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_FALSE(saved->pending);
  EXPECT_EQ(saved->path, folder_ / "checkpoints/step_1");
  EXPECT_GT(saved->bytes, 0);
  EXPECT_TRUE(core_->unsaved());  // the steps since then
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved->path}).ok());
  EXPECT_EQ(core_->Info().weights.version, saved_weights.version);
  EXPECT_EQ(core_->Info().weights.digest, saved_weights.digest);
  EXPECT_FALSE(Step(Identity(1)).value().replayed);
}

TEST_F(BackgroundSaveTest, ACompanionIsCopiedWithTheModel) {
  int updates_at_write = 0;
  companion_.before_write = [&] { updates_at_write = companion_.count; };
  ASSERT_TRUE(Step(Identity(0)).ok());
  companion_.fail_copy = true;
  EXPECT_FALSE(core_->SaveCheckpoint({}, Request(1, true)).ok());
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(1, true)).ok());
  ASSERT_TRUE(Step(Identity(1)).ok());
  ASSERT_TRUE(Step(Identity(2)).ok());
  Write();
  const auto saved = core_->SaveCheckpoint({}, Request(1, false));
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(updates_at_write, 3);
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved->path}).ok());
  EXPECT_EQ(companion_.count, 1);
}

TEST_F(BackgroundSaveTest, NothingIsUnsavedOnceTheLastStateIsWritten) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(1, true)).ok());
  EXPECT_TRUE(core_->unsaved());
  Write();
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(1, false)).ok());
  EXPECT_FALSE(core_->unsaved());
  strategy_->fail_before_update = true;
  EXPECT_FALSE(Step(Identity(1)).ok());
  EXPECT_FALSE(core_->unsaved());
  ASSERT_TRUE(Step(Identity(1)).ok());
  EXPECT_TRUE(core_->unsaved());
}

TEST_F(BackgroundSaveTest, AFailureIsToldOnceAndStepsGoOn) {
  std::vector<CheckpointReport> reports;
  change_options = [&](TrainingOptions& options) {
    options.on_checkpoint = [&](const CheckpointReport& report) { reports.push_back(report); };
  };
  const auto before = strategy_->before_write;
  core_ = Make();
  strategy_->before_write = before;
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, true)).ok());
  ASSERT_TRUE(Step(Identity(0)).ok());
  const absl::Status full = absl::ResourceExhaustedError("the disk is full");
  Write(full);
  EXPECT_EQ(core_->SaveCheckpoint({}, Request(0, false)).status(), full);
  EXPECT_FALSE(Exists(0));
  ASSERT_TRUE(Step(Identity(1)).ok());
  // Now it is a save of its own, of a version that is gone.
  EXPECT_EQ(FieldPath(core_->SaveCheckpoint({}, Request(0, false)).status()), "expected_version");
  outcome_ = absl::OkStatus();
  EXPECT_TRUE(core_->SaveCheckpoint({}, Request(2, false)).ok());
  core_ = nullptr;
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].saved.status(), full);
  EXPECT_TRUE(reports[1].saved.ok());
}

TEST_F(BackgroundSaveTest, OtherSavesAndLoadsWaitForIt) {
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, true)).ok());
  ASSERT_TRUE(Step(Identity(0)).ok());
  // Callers that do not wait for long.
  CallScope call;
  call.deadline = SteadyTime::Now() + absl::Milliseconds(20);
  for (const absl::Status& status :
       {core_->SaveCheckpoint(call, Request(1, true)).status(), core_->LoadBaseModel(call),
        core_->LoadCheckpoint(call, {folder_ / "checkpoints/step_0"}),
        core_->SaveCheckpoint(call, Request(0, false)).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  absl::StatusOr<checkpoint::Saved> second;
  std::thread waits([&] { second = core_->SaveCheckpoint({}, Request(1, false)); });
  Write();
  waits.join();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(Exists(0) && Exists(1));
  EXPECT_TRUE(core_->LoadCheckpoint({}, {folder_ / "checkpoints/step_0"}).ok());
}

TEST_F(BackgroundSaveTest, ACheckpointThatIsGoneIsWrittenAgain) {
  Write();
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, true)).ok());
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, false)).ok());
  std::filesystem::remove_all(folder_ / "checkpoints");
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, false)).ok());
  EXPECT_TRUE(Exists(0));
}

TEST_F(BackgroundSaveTest, AShutdownFinishesIt) {
  ASSERT_TRUE(core_->SaveCheckpoint({}, Request(0, true)).ok());
  std::thread later([&] { Write(); });
  core_->Shutdown();
  later.join();
  EXPECT_TRUE(Exists(0));
  EXPECT_EQ(core_->SaveCheckpoint({}, Request(1, true)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(TrainingCoreTest, WithoutASnapshotACheckpointIsWrittenInItsTurn) {
  change_options = [](TrainingOptions& options) { options.checkpoint_snapshot = false; };
  core_ = Make();
  const auto saved = core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints",
                                                .name = "one",
                                                .expected_version = 0,
                                                .in_background = true});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_FALSE(saved->pending);
  EXPECT_GT(saved->bytes, 0);
}

TEST_F(TrainingCoreTest, AfterAnUpdateThatBrokeOffOnlyACheckpointHelps) {
  const std::string directory = folder_ / "checkpoints";
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = directory, .name = "step_0"}).value().path;
  strategy_->break_off = true;
  const absl::Status broken = Step(Identity()).status();
  EXPECT_EQ(broken.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(broken.message().find("load a checkpoint"), std::string::npos);
  EXPECT_EQ(Step(Identity()).status(), broken);
  EXPECT_EQ(core_->SaveCheckpoint({}, {.directory = directory, .name = "step_1"}).status(), broken);
  EXPECT_TRUE(core_->unsaved());
  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_FALSE(core_->unsaved());
  EXPECT_FALSE(Step(Identity()).value().replayed);
}

TEST_F(TrainingCoreTest, AfterALoadThatBrokeOffOnlyACheckpointHelps) {
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_0"})
          .value()
          .path;
  ASSERT_TRUE(Step(Identity(0)).ok());
  strategy_->fail_load = true;
  EXPECT_EQ(core_->LoadCheckpoint({}, {path}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Step(Identity(1)).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(core_->LoadCheckpoint({}, {folder_ / "nothing"}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Step(Identity(1)).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_FALSE(Step(Identity(0)).value().replayed);
}

TEST_F(TrainingCoreTest, SeveralUpdatesAreOneStep) {
  const StepResult both = Step(Identity(), {}, 2).value();
  EXPECT_EQ(both.report.weights.version, 1);
  EXPECT_EQ(both.report.metrics.at("policy/updates"), 2);
  EXPECT_EQ(strategy_->optimizer_steps(), 2);
  EXPECT_EQ(Step(Identity(), {}, 2).value().report, both.report);  // replayed
  EXPECT_EQ(strategy_->optimizer_steps(), 2);

  // The result equals that of two steps.
  core_ = Make();
  const double first = Step(Identity(0)).value().report.metrics.at("policy/grad_norm");
  const StepResult second = Step(Identity(1)).value();
  EXPECT_EQ(second.report.weights.digest, both.report.weights.digest);
  EXPECT_EQ(both.report.metrics.at("policy/grad_norm"),
            (first + second.report.metrics.at("policy/grad_norm")) / 2);
}

TEST_F(TrainingCoreTest, AnUpdateThatIsNotFiniteIsLeftOutOfAStep) {
  strategy_->not_finite = true;  // the first update
  const StepResult one = Step(Identity(), {}, 2).value();
  EXPECT_FALSE(one.report.skipped);
  EXPECT_EQ(one.report.metrics.at("policy/updates"), 1);
  EXPECT_EQ(one.report.metrics.at("policy/updates_not_finite"), 1);
  EXPECT_TRUE(Step(Identity(), {}, 2).value().replayed);
  core_ = Make();
  EXPECT_EQ(Step(Identity()).value().report.weights, one.report.weights);

  core_ = Make();  // now the last update
  int update = 0;
  before_gradients = [&] { strategy_->not_finite = update++ == 1; };
  const StepResult other = Step(Identity(), {}, 2).value();
  EXPECT_EQ(other.report.weights, one.report.weights);
  EXPECT_EQ(other.report.metrics, one.report.metrics);
}

TEST_F(TrainingCoreTest, AStepThatBreaksOffAfterAnUpdateNeedsACheckpoint) {
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_0"})
          .value()
          .path;
  int update = 0;
  before_gradients = [&] {
    if (update++ == 1) throw std::runtime_error("no memory");
  };
  const absl::Status broken = Step(Identity(), {}, 2).status();
  EXPECT_EQ(broken.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(broken.message().find("after 1 of its 2 updates"), std::string::npos) << broken;
  EXPECT_EQ(Step(Identity(), {}, 2).status(), broken);
  EXPECT_TRUE(core_->unsaved());
  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_FALSE(Step(Identity(), {}, 2).value().replayed);

  // An error before the first update changes nothing.
  core_ = Make();
  update = 1;
  EXPECT_EQ(Step(Identity(), {}, 2).status().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(core_->unsaved());
  EXPECT_FALSE(Step(Identity(), {}, 2).value().replayed);
}

TEST_F(TrainingCoreTest, AnExportRemovesWhatCrashesLeftOfIt) {
  const std::filesystem::path left = folder_ / ".tandem-tmp-123-0-x", other = folder_ / ".tmp-1-x";
  std::filesystem::create_directories(left);
  std::filesystem::create_directories(other);
  ASSERT_TRUE(core_->ExportModel({}, folder_ / "export", DType::kFloat32).ok());
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(other));
}

TEST_F(TrainingCoreTest, AnExportThatCannotBeWrittenNamesThePath) {
  const absl::Status below_a_file =
      core_->ExportModel({}, folder_ / "model/config.json/export", DType::kFloat32);
  EXPECT_EQ(below_a_file.code(), absl::StatusCode::kFailedPrecondition) << below_a_file;
  EXPECT_EQ(FieldPath(below_a_file), "path");
  const absl::Status read_only = core_->ExportModel({}, "/proc/export", DType::kFloat32);
  EXPECT_NE(read_only.code(), absl::StatusCode::kInternal) << read_only;
  EXPECT_EQ(FieldPath(read_only), "path");
  EXPECT_EQ(FieldPath(core_->ExportModel({}, "~/export", DType::kFloat32)), "path");
}

TEST_F(TrainingCoreTest, TheBaseModelBeginsARunAnew) {
  const EngineInfo start = core_->Info();
  const StepResult first = Step(Identity(0)).value(), second = Step(Identity(1)).value();
  core_->state().kept_values.Open("run", "0", core_->weights());
  ASSERT_TRUE(core_->LoadBaseModel({}).ok());
  EXPECT_EQ(core_->Info().weights, start.weights);
  EXPECT_EQ(core_->Info().optimizer_steps, 0);
  EXPECT_FALSE(core_->unsaved());
  EXPECT_EQ(core_->state().lineage.DigestOf(1), "");
  EXPECT_EQ(core_->state().kept_values.Find("run", "0"), nullptr);
  // The step is not replayed, and its bits equal those of a new server.
  const StepResult again = Step(Identity(0)).value();
  EXPECT_FALSE(again.replayed);
  EXPECT_EQ(again.report, first.report);
  EXPECT_EQ(Step(Identity(1)).value().report, second.report);
}

TEST_F(TrainingCoreTest, ABaseModelWhoseFilesHaveChangedIsRefusedAndNothingChanges) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const EngineInfo before = core_->Info();
  WriteTinyModel(folder_ / "model", /*seed=*/4);
  const absl::Status changed = core_->LoadBaseModel({});
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition) << changed;
  EXPECT_EQ(FieldPath(changed), "base_model");
  std::filesystem::remove(folder_ / "model/model.safetensors");
  EXPECT_EQ(core_->LoadBaseModel({}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(core_->Info().weights, before.weights);
  EXPECT_TRUE(core_->unsaved());
  EXPECT_TRUE(Step(Identity(1)).ok());
}

// Nobody reads all values to find that out before.
TEST_F(TrainingCoreTest, AChangeAmidTheBaseModelIsFoundByTheDigestOfWhatWasLoaded) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const auto saved =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "one"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  const std::string file = folder_ / "model/model.safetensors";
  {
    std::fstream weights(file, std::ios::in | std::ios::out | std::ios::binary);
    weights.seekp(static_cast<std::streamoff>(std::filesystem::file_size(file) / 2));
    weights.put('\x01');
  }
  const absl::Status changed = core_->LoadBaseModel({});
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition) << changed;
  EXPECT_EQ(FieldPath(changed), "base_model");
  EXPECT_TRUE(absl::IsDataLoss(Step(Identity(1)).status()));
  ASSERT_TRUE(core_->LoadCheckpoint({}, {saved->path}).ok());
  EXPECT_TRUE(Step(Identity(1)).ok());
}

TEST_F(TrainingCoreTest, TheBaseModelHelpsAfterAnUpdateThatBrokeOff) {
  strategy_->break_off = true;
  EXPECT_EQ(Step(Identity()).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(core_->LoadBaseModel({}).ok());
  EXPECT_FALSE(Step(Identity()).value().replayed);
}

// Contents that a checkpoint with matching digests may have.
TEST_F(TrainingCoreTest, ACheckpointThatNoTrainingLeavesIsDataLossAndChangesNothing) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  const EngineInfo before = core_->Info();
  const std::string directory = folder_ / "checkpoints";
  const auto crafted = [&](const std::string& file, const auto& edit) {
    const std::string path =
        core_->SaveCheckpoint({}, {.directory = directory, .name = "step_1"}).value().path;
    const auto saved = checkpoint::Save(
        directory, "crafted", {.kind = "trainer", .step = 1}, [&](const std::string& target) {
          std::filesystem::create_directory(target + "/companion");
          for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
            const std::string name = entry.path().lexically_relative(path);
            if (!entry.is_regular_file() || name == "manifest.json") continue;
            TANDEM_RETURN_IF_ERROR(CopyFileDurably(entry.path(), target + "/" + name));
          }
          NamedTensors tensors = ReadNamedTensors(target + "/" + file).value();
          edit(tensors);
          return WriteNamedTensors(target + "/" + file, tensors);
        });
    return core_->LoadCheckpoint({}, {saved.value().path});
  };
  const auto set = [](const std::string& name, double value) {
    return [=](NamedTensors& tensors) {
      for (auto& [key, tensor] : tensors) {
        if (key == name) tensor.view({-1})[0] = value;
      }
    };
  };
  const std::string norm = "model.norm.weight";
  const struct {
    std::string file, tensor;
    double value;
  } cases[] = {{"model.safetensors", norm, NAN},
               {"model.safetensors", norm, INFINITY},
               {"optimizer.safetensors", norm + ".exp_avg", NAN},
               {"optimizer.safetensors", norm + ".exp_avg_sq", -1},
               {"optimizer.safetensors", "optimizer.steps", -1}};
  for (const auto& c : cases) {
    const absl::Status status = crafted(c.file, set(c.tensor, c.value));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.tensor << ": " << status;
    EXPECT_NE(status.message().find("'" + c.tensor + "'"), std::string::npos) << status;
    EXPECT_EQ(core_->Info().weights, before.weights);
  }
  EXPECT_TRUE(Step(Identity(1)).ok());
}

TEST_F(TrainingCoreTest, ACheckpointWithAnotherVocabularyIsRefusedAndChangesNothing) {
  const auto write = [&](const std::string& vocab) {
    std::ofstream(folder_ / "model/tokenizer.json") << R"({"model": {"vocab": )" << vocab << "}}";
  };
  const auto saved = [&](const std::string& name) {
    return core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = name})
        .value()
        .path;
  };
  const std::string without = saved("without");
  write(R"({"a": 0, "b": 60})");
  core_ = Make();
  const std::string same = saved("same");
  ASSERT_TRUE(Step(Identity(0)).ok());
  EXPECT_TRUE(core_->LoadCheckpoint({}, {without}).ok());
  EXPECT_TRUE(core_->LoadCheckpoint({}, {same}).ok());

  write(R"({"b": 0, "a": 60})");
  core_ = Make();
  ASSERT_TRUE(Step(Identity(0)).ok());
  const EngineInfo before = core_->Info();
  const absl::Status refused = core_->LoadCheckpoint({}, {same});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_EQ(FieldPath(refused), "path");
  EXPECT_NE(refused.message().find("a different vocabulary"), std::string::npos) << refused;
  EXPECT_EQ(core_->Info().weights, before.weights);
  EXPECT_TRUE(Step(Identity(1)).ok());
}

TEST_F(TrainingCoreTest, TheVocabularyOfTheModelIsReportedByItsDigest) {
  EXPECT_EQ(core_->Info().model.vocabulary_digest, "");
  EXPECT_EQ(core_->vocabulary(), nullptr);
  const auto write = [&](const std::string& vocab) {
    std::ofstream(folder_ / "model/tokenizer.json") << R"({"model": {"vocab": )" << vocab << "}}";
  };
  write(R"({"a": 0, "b": 60})");
  core_ = Make();
  const std::string entries = "0 a\n60 b\n";
  EXPECT_EQ(core_->Info().model.vocabulary_digest,
            Checksum().Update(entries.data(), entries.size()).Hex());
  // Ids beyond the model's 61 embeddings are no tokens of it.
  write(R"({"a": 0, "b": 61})");
  core_ = Make();
  EXPECT_EQ(core_->Info().model.num_token_ids, 61);
}

TEST_F(TrainingCoreTest, AFailureBeforeTheUpdateChangesNothing) {
  const EngineInfo before = core_->Info();
  strategy_->fail_before_update = true;
  EXPECT_EQ(Step(Identity()).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(core_->Info().weights, before.weights);
  EXPECT_FALSE(core_->unsaved());
  const absl::StatusOr<StepResult> retry = Step(Identity());
  ASSERT_TRUE(retry.ok()) << retry.status();
  EXPECT_FALSE(retry->replayed);
  EXPECT_EQ(retry->report.weights.version, 1);
}

TEST_F(TrainingCoreTest, ANumberThatIsNotFiniteSkipsTheStepAndTheNextOneApplies) {
  const EngineInfo before = core_->Info();
  strategy_->not_finite = true;
  const absl::StatusOr<StepResult> skipped = Step(Identity());
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->not_finite);
  EXPECT_TRUE(skipped->report.skipped);
  EXPECT_EQ(skipped->report.skip_reason, "the gradient");
  EXPECT_EQ(skipped->report.metrics, (std::map<std::string, double>{{"loss/total", 0.5}}));
  EXPECT_EQ(skipped->report.weights, before.weights);
  EXPECT_EQ(core_->Info().optimizer_steps, 0);
  EXPECT_TRUE(core_->unsaved());
  const absl::StatusOr<StepResult> again = Step(Identity());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_FALSE(again->not_finite);  // counted once
  EXPECT_EQ(again->report, skipped->report);

  StepIdentity next = Identity(1);
  next.expected_version = 0;
  const absl::StatusOr<StepResult> applied = Step(next);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->report.weights.version, 1);
  EXPECT_EQ(core_->Info().optimizer_steps, 1);
}

TEST_F(TrainingCoreTest, ACallThatIsOverNeverBegins) {
  CallScope call;
  call.deadline = SteadyTime::InfinitePast();
  EXPECT_EQ(Step(Identity(), call).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(core_->Info().weights.version, 0);
}

TEST_F(TrainingCoreTest, ACheckpointTakesItsLineageAndTableBack) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  EXPECT_TRUE(core_->unsaved());
  const std::string path =
      core_->SaveCheckpoint({}, {.directory = folder_ / "checkpoints", .name = "step_1"})
          .value()
          .path;
  EXPECT_FALSE(core_->unsaved());
  const StepResult second = Step(Identity(1)).value();
  ASSERT_TRUE(core_->LoadCheckpoint({}, {path}).ok());
  EXPECT_EQ(core_->Info().weights.version, 1);
  EXPECT_EQ(core_->state().lineage.DigestOf(2), "");
  EXPECT_TRUE(Step(Identity(0)).value().replayed);
  const StepResult again = Step(Identity(1)).value();
  EXPECT_FALSE(again.replayed);
  EXPECT_EQ(again.report, second.report);
}

TEST_F(TrainingCoreTest, OptionsReachTheModel) {
  TrainingOptions options;
  SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
  options.freeze = {"model.embed_tokens.*"};
  options.compute.dtype = "bfloat16";
  const auto core =
      std::move(TrainingCore::Create("trainer", "policy/", options, {.requires_grad = true}))
          .value();
  EXPECT_EQ(core->model().dtype(), at::kBFloat16);
  EXPECT_EQ(core->model().weight_dtype(), at::kFloat);
  EXPECT_LT(core->Info().model.num_trainable_parameters, core->Info().model.num_parameters);
  TrainingOptions rounded = options;
  rounded.compute.dtype = "float32";
  rounded.compute.weight_dtype = "bfloat16";
  EXPECT_EQ(TrainingCore::Create("trainer", "policy/", rounded, {.requires_grad = true})
                .value()
                ->model()
                .weight_dtype(),
            at::kBFloat16);
  options.freeze = {"nothing"};
  EXPECT_EQ(
      FieldPath(
          TrainingCore::Create("trainer", "policy/", options, {.requires_grad = true}).status()),
      "freeze[0]");
  if (!at::hasCUDA()) {
    options.compute.device = "cuda";
    EXPECT_EQ(FieldPath(TrainingCore::Create("trainer", "policy/", options, {}).status()),
              "compute.device");
  }
}

TEST_F(TrainingCoreTest, AnUnknownStrategyIsNamed) {
  TrainingOptions options;
  SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
  options.strategy.name = "nonsense";
  const absl::Status status = TrainingCore::Create("trainer", "policy/", options, {}).status();
  EXPECT_EQ(FieldPath(status), "strategy.name");
}

}  // namespace
}  // namespace tandem::training
