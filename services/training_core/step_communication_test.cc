// What a step and a publication send in every layout: a gather of the model to one rank, which a
// small model hides, must not come back.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/testing/rank_processes.h"
#include "services/training_core/service/testing/resolved_options.h"
#include "services/training_core/training_core.h"

namespace tandem::training {
namespace {

struct Layout {
  const char* name;
  parallel::StrategyOptions strategy;
  int ranks = 2;

  friend void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }
};

class StepCommunicationTest : public ::testing::TestWithParam<Layout> {
 protected:
  StepCommunicationTest() {
    WriteTinyModel(folder_ / "model", /*seed=*/3, {{"intermediate_size", 44}});
  }

  TrainingOptions Options(const RankEnvironment& environment) const {
    TrainingOptions options;
    SetResolvedOptions(folder_ / "model", {"compute.num_threads=1"}, &options);
    options.environment = environment;
    options.strategy = GetParam().strategy;
    options.strategy.megatron.use_distributed_optimizer = true;
    options.rank_timeouts.silence = absl::Seconds(5);
    return options;
  }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, StepCommunicationTest,
    ::testing::Values(
        Layout{"zero_1", {.name = "zero", .zero = parallel::ZeroOfStage(1)}},
        Layout{"zero_2", {.name = "zero", .zero = parallel::ZeroOfStage(2)}},
        Layout{"zero_3", {.name = "zero", .zero = parallel::ZeroOfStage(3)}},
        Layout{"zero_3_of_4", {.name = "zero", .zero = parallel::ZeroOfStage(3)}, 4},
        Layout{"tensor_2", {.name = "megatron", .megatron = {.tensor_model_parallel_size = 2}}},
        Layout{"pipeline_2", {.name = "megatron", .megatron = {.pipeline_model_parallel_size = 2}}},
        Layout{"context_2", {.name = "megatron", .megatron = {.context_parallel_size = 2}}},
        Layout{"data_2", {.name = "megatron"}},
        Layout{"tensor_2_data_2",
               {.name = "megatron", .megatron = {.tensor_model_parallel_size = 2}},
               4}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(StepCommunicationTest, AStepSendsWhatItsPassesAndItsUpdateSend) {
  ranks::RunOnRanks(GetParam().ranks, [&](const RankEnvironment& environment) {
    const auto core =
        std::move(TrainingCore::Create("trainer", "policy/", Options(environment),
                                       {.head = HeadKind::kLm, .requires_grad = true}))
            .value();
    parallel::Strategy& strategy = core->strategy();
    const auto sent_by = [&](const auto& body) {
      const int64_t before = strategy.ranks().total_sent_bytes();
      body();
      return strategy.ranks().total_sent_bytes() - before;
    };
    const auto add_gradients = [&]() -> absl::Status {
      const SequenceRows rows =
          SelectSequenceRows({1, 2}, {3, 4, 5, 6, 7}, [](size_t) { return true; });
      const SequenceBatch batch({rows, rows, rows, rows});
      return core
          ->ForwardBackward(batch, batch.all(),
                            [](const MicroBatchInput&, const at::Tensor& hidden) {
                              return absl::StatusOr<at::Tensor>(at::ones_like(hidden));
                            })
          .status();
    };
    int64_t deferred = -1, with_digest = -1, passes = -1, gathered = -1;
    const auto step = core->AddCommand<StepIdentity, absl::StatusOr<StepResult>>(
        "step",
        [&](const CallScope&, const StepIdentity& identity) {
          absl::StatusOr<StepResult> result;
          (identity.defer_digest ? deferred : with_digest) = sent_by([&] {
            result = core->Step(
                identity,
                [&](StepReport&) -> absl::StatusOr<std::vector<TrainingCore::UpdateGradients>> {
                  return std::vector<TrainingCore::UpdateGradients>{
                      [&](StepReport&) { return add_gradients(); }};
                });
          });
          return result;
        },
        TrainingCore::Needs::kWeights);
    const auto alone = core->AddCommand<TrainingCore::NoRequest, absl::Status>(
        "passes and update",
        [&](const CallScope&, const TrainingCore::NoRequest&) {
          absl::Status status;
          passes = sent_by([&] {
            status = add_gradients();
            if (status.ok()) status = strategy.OptimizerStep({}).status();
          });
          return status;
        },
        TrainingCore::Needs::kWeights);
    const auto visit = core->AddCommand<TrainingCore::NoRequest, absl::Status>(
        "visit", [&](const CallScope&, const TrainingCore::NoRequest&) {
          absl::Status status;
          gathered = sent_by([&] {
            status = parallel::UseWholeParameters(
                strategy, [](const Parameter&) { return true; },
                [](TensorSource parameters) {
                  return parameters(
                      [](const std::string&, const at::Tensor&) { return absl::OkStatus(); });
                });
          });
          return status;
        });
    core->Start();
    if (environment.rank == 0) {
      StepIdentity identity = {
          .run_id = "run", .step = 0, .request_id = "a", .payload_digest = "a"};
      identity.defer_digest = true;
      const auto first = step({}, identity);
      ASSERT_TRUE(first.ok()) << first.status();
      EXPECT_EQ(first->report.weights.version, 1);
      EXPECT_EQ(first->report.weights.digest, "");
      EXPECT_EQ(core->Info().weights, first->report.weights);
      identity = {.run_id = "run",
                  .step = 1,
                  .request_id = "b",
                  .payload_digest = "b",
                  .expected_version = 1};
      const auto second = step({}, identity);
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_EQ(second->report.weights.digest.size(), 32);
      EXPECT_TRUE(visit({}, {}).ok());
      EXPECT_TRUE(alone({}, {}).ok());
    }
    const auto parameters = static_cast<int64_t>(core->model().DeclaredParameters().size());
    core->Shutdown();
    EXPECT_EQ(deferred, passes) << "beside the passes and the update, a step sends something";
    const int64_t n = GetParam().ranks;
    EXPECT_EQ(with_digest - passes, parameters * 16 * 2 * (n - 1) / n);
    // A publication gathers every value once, whoever sends it.
    constexpr int64_t kAgreement = 4096;
    const int64_t model_bytes = core->Info().model.num_parameters * 4;
    EXPECT_LE(gathered, model_bytes + kAgreement);
  });
}

}  // namespace
}  // namespace tandem::training
