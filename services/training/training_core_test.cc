#include "services/training/training_core.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <utility>

#include "common/base/error.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/single_process_strategy.h"

namespace tandem::training {
namespace {

// Throws where it is told to.
class FailingStrategy final : public parallel::SingleProcessStrategy {
 public:
  absl::StatusOr<parallel::OptimizerReport> OptimizerStep() override {
    if (std::exchange(fail_before_update, false)) throw std::runtime_error("before the update");
    if (std::exchange(break_off, false)) return absl::DataLossError("in the update");
    auto report = SingleProcessStrategy::OptimizerStep();
    if (std::exchange(fail_after_update, false)) throw std::runtime_error("after the update");
    return report;
  }
  int64_t optimizer_steps() const override {
    // The core asks before and after an update, then for what it publishes.
    if (fail_publishing > 0 && --fail_publishing == 0) throw std::runtime_error("publishing");
    return SingleProcessStrategy::optimizer_steps();
  }
  absl::Status ScatterParameters(const NamedTensors& parameters) override {
    if (std::exchange(fail_scatter, false)) throw std::runtime_error("while loading");
    return SingleProcessStrategy::ScatterParameters(parameters);
  }
  bool fail_scatter = false;
  bool fail_before_update = false;
  bool break_off = false;
  bool fail_after_update = false;
  mutable int fail_publishing = 0;  // at this call of optimizer_steps
};

class TrainingCoreTest : public ::testing::Test {
 protected:
  TrainingCoreTest() {
    WriteTinyModel(folder_ / "model", /*seed=*/3);
    core_ = Make();
  }

  std::unique_ptr<TrainingCore> Make() {
    TrainingOptions options;
    options.model = folder_ / "model";
    options.compute.num_threads = 1;
    options.optimizer.learning_rate = 1e-2;
    auto strategy = std::make_unique<FailingStrategy>();
    strategy_ = strategy.get();
    return std::move(TrainingCore::Create("trainer", "policy/", options,
                                          {.head = HeadKind::kLm, .requires_grad = true},
                                          std::move(strategy)))
        .value();
  }

  static StepIdentity Identity(int64_t step = 0) {
    return {.run_id = "run",
            .step = step,
            .request_id = std::to_string(step),
            .payload_digest = "payload",
            .expected_version = step};
  }
  // A step on the sum of all hidden states.
  absl::StatusOr<StepResult> Step(const StepIdentity& identity, const CallScope& call = {}) {
    return core_->Run(call, "train step", [&] {
      return core_->Step(identity, [&](StepReport& report) {
        report.metrics["loss/total"] = 0.5;
        const SequenceRows rows =
            SelectSequenceRows({1, 2}, {3, 4, 5}, [](size_t) { return true; });
        return core_
            ->ForwardBackward({rows},
                              [&](const MicroBatchInput& input) {
                                CausalContext context;
                                core_->model().HiddenStates(input.batch, context).sum().backward();
                                return absl::OkStatus();
                              })
            .status();
      });
    });
  }

  TemporaryFolder folder_;
  std::unique_ptr<TrainingCore> core_;
  FailingStrategy* strategy_ = nullptr;  // of core_
};

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

  // The same as if nothing had failed.
  const StepResult next = Step(Identity(1)).value();
  core_ = Make();
  ASSERT_TRUE(Step(Identity()).ok());
  EXPECT_EQ(Step(Identity(1)).value().report, next.report);
}

TEST_F(TrainingCoreTest, AFailureBehindTheUpdateInTheStrategyCountsTheStepOnce) {
  strategy_->fail_after_update = true;
  const absl::StatusOr<StepResult> first = Step(Identity());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->report.weights.version, 1);
  EXPECT_EQ(first->report.metrics.count("policy/grad_norm"), 0);  // nobody knows it any more
  EXPECT_TRUE(core_->unsaved());
  const StepResult repeat = Step(Identity()).value();
  EXPECT_TRUE(repeat.replayed);
  EXPECT_EQ(repeat.report, first->report);
  EXPECT_EQ(strategy_->optimizer_steps(), 1);

  // The same as if nothing had failed.
  const StepResult next = Step(Identity(1)).value();
  core_ = Make();
  EXPECT_EQ(Step(Identity()).value().report.weights, first->report.weights);
  EXPECT_EQ(Step(Identity(1)).value().report, next.report);
}

TEST_F(TrainingCoreTest, ADigestThatFailedIsThereForWhateverComesNext) {
  strategy_->fail_publishing = 3;
  EXPECT_FALSE(Step(Identity()).ok());
  const auto weights =
      core_->Run({}, "test", [&]() -> absl::StatusOr<WeightsVersion> { return core_->weights(); });
  EXPECT_EQ(weights->version, 1);
  EXPECT_NE(weights->digest, "");
}

TEST_F(TrainingCoreTest, AfterAnUpdateThatBrokeOffOnlyACheckpointHelps) {
  const std::string directory = folder_ / "checkpoints";
  const std::string path = core_->SaveCheckpoint({}, directory, "step_0", 0).value().path;
  strategy_->break_off = true;
  const absl::Status broken = Step(Identity()).status();
  EXPECT_EQ(broken.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(broken.message().find("load a checkpoint"), std::string::npos);
  EXPECT_EQ(Step(Identity()).status(), broken);
  EXPECT_EQ(core_->SaveCheckpoint({}, directory, "step_1", 0).status(), broken);
  EXPECT_TRUE(core_->unsaved());
  ASSERT_TRUE(core_->LoadCheckpoint({}, path).ok());
  EXPECT_FALSE(core_->unsaved());
  EXPECT_FALSE(Step(Identity()).value().replayed);
}

TEST_F(TrainingCoreTest, AfterALoadThatBrokeOffOnlyACheckpointHelps) {
  const std::string path =
      core_->SaveCheckpoint({}, folder_ / "checkpoints", "step_0", 0).value().path;
  ASSERT_TRUE(Step(Identity(0)).ok());
  strategy_->fail_scatter = true;
  EXPECT_EQ(core_->LoadCheckpoint({}, path).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Step(Identity(1)).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(core_->LoadCheckpoint({}, folder_ / "nothing").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Step(Identity(1)).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(core_->LoadCheckpoint({}, path).ok());
  EXPECT_FALSE(Step(Identity(0)).value().replayed);
}

TEST_F(TrainingCoreTest, AnExportRemovesWhatCrashesLeftOfIt) {
  const std::filesystem::path left = folder_ / ".tmp-123-export", other = folder_ / ".tmp-123-x";
  std::filesystem::create_directories(left);
  std::filesystem::create_directories(other);
  ASSERT_TRUE(core_->ExportModel({}, folder_ / "export", DType::kFloat32).ok());
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(other));
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

TEST_F(TrainingCoreTest, ACallThatIsOverNeverBegins) {
  CallScope call;
  call.deadline = absl::InfinitePast();
  EXPECT_EQ(Step(Identity(), call).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(core_->Info().weights.version, 0);
}

TEST_F(TrainingCoreTest, ACheckpointTakesItsLineageAndTableBack) {
  ASSERT_TRUE(Step(Identity(0)).ok());
  EXPECT_TRUE(core_->unsaved());
  const std::string path =
      core_->SaveCheckpoint({}, folder_ / "checkpoints", "step_1", 0).value().path;
  EXPECT_FALSE(core_->unsaved());
  const StepResult second = Step(Identity(1)).value();
  ASSERT_TRUE(core_->LoadCheckpoint({}, path).ok());
  EXPECT_EQ(core_->Info().weights.version, 1);
  EXPECT_EQ(core_->state().lineage.DigestOf(2), "");
  EXPECT_TRUE(Step(Identity(0)).value().replayed);
  const StepResult again = Step(Identity(1)).value();
  EXPECT_FALSE(again.replayed);
  EXPECT_EQ(again.report, second.report);
}

TEST_F(TrainingCoreTest, OptionsReachTheModel) {
  TrainingOptions options;
  options.model = folder_ / "model";
  options.freeze = {"model.embed_tokens.*"};
  options.compute = {.dtype = "bfloat16", .num_threads = 1};
  const auto core =
      std::move(TrainingCore::Create("trainer", "policy/", options, {.requires_grad = true}))
          .value();
  EXPECT_EQ(core->model().dtype(), at::kBFloat16);
  EXPECT_LT(core->Info().model.num_trainable_parameters, core->Info().model.num_parameters);
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
  options.model = folder_ / "model";
  options.strategy = "zero";
  const absl::Status status = TrainingCore::Create("trainer", "policy/", options, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace tandem::training
