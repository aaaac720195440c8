// Ranks on simulated GPUs: which of them share one, what a missing wait for a collective does, and
// how much of ZeRO's communication has computation beside it.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/zero/zero_strategy.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/tensor_memory.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::ranks {
namespace {

using simulated_gpu::TheCounts;

// Before the first rank: see DeviceOfTests.
const int on_gpus = setenv("TANDEM_TEST_DEVICE", "cuda", /*overwrite=*/1);

std::shared_ptr<Communicator> Connected(const RankEnvironment& environment,
                                        c10::DeviceIndex device) {
  simulated_gpu::SetCurrentDevice(device);
  return Communicator::Connect(environment,
                               {.device = DeviceOfTests(), .timeout = absl::Minutes(1)})
      .value();
}

at::Tensor OnGpu(std::initializer_list<float> values) {
  return at::tensor(values).to(DeviceOfTests());
}

void ExpectValues(const at::Tensor& tensor, std::initializer_list<float> values) {
  EXPECT_TRUE(at::equal(tensor.cpu(), at::tensor(values))) << tensor.cpu();
}

// Whether the two ranks have a GPU each.
class GpuRanksTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuRanksTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "OfTheirOwn" : "Shared"; });

TEST_P(GpuRanksTest, CollectivesHaveTheirResults) {
  const bool own = GetParam();
  RunOnRanks(2, [own](const RankEnvironment& environment) {
    testing::internal::CaptureStderr();
    const auto rank = static_cast<c10::DeviceIndex>(environment.rank);
    const auto ranks = Connected(environment, own ? rank : c10::DeviceIndex{0});
    const auto subgroup = ranks->Split("all", {{0, 1}});
    const std::string log = testing::internal::GetCapturedStderr();
    size_t warnings = 0;
    for (size_t at = log.find("ranks_share_gpu"); at != std::string::npos;
         at = log.find("ranks_share_gpu", at + 1)) {
      ++warnings;
    }
    EXPECT_EQ(warnings, !own && rank == 0 ? 1 : 0) << log;

    const auto r = static_cast<float>(rank);
    at::Tensor values = OnGpu({1 + r, 10 * r});
    subgroup->AllReduce(values, Reduction::kSum);
    ExpectValues(values, {3, 10});
    ranks->AllReduce(values.add_(r), Reduction::kMax);
    ExpectValues(values, {4, 11});
    const at::Tensor shard = OnGpu({0}), whole = OnGpu({0, 0});
    ranks->ReduceScatter(shard, OnGpu({1 + r, 5}));
    ExpectValues(shard, {rank == 0 ? 3.0f : 10.0f});
    ranks->AllGather(whole, shard);
    ExpectValues(whole, {3, 10});
    ranks->AllToAll(whole, OnGpu({r, r + 2}), {1, 1}, {1, 1});
    ExpectValues(
        whole, rank == 0 ? std::initializer_list<float>{0, 1} : std::initializer_list<float>{2, 3});
    at::Tensor sent = OnGpu({7 + r});
    ranks->Broadcast(sent, 1);
    ExpectValues(sent, {8});
    if (rank == 0) {
      ranks->Send(sent.add_(1), 1);
    } else {
      ranks->Recv(sent, 0);
    }
    ExpectValues(sent, {9});
    ranks->Barrier();
  });
}

// Lets rank 0 `act` between the start of a reduce-scatter and its wait, after which it reads the
// result; returns how the rank ended.
std::string EndOf(
    const std::function<void(const at::Tensor& input, const at::Tensor& output)>& act) {
  RankProcesses processes(2, [&](const RankEnvironment& environment) {
    const auto ranks = Connected(environment, static_cast<c10::DeviceIndex>(environment.rank));
    const at::Tensor input = OnGpu({1, 2, 3, 4}), output = OnGpu({0, 0});
    CollectiveHandle handle = ranks->ReduceScatterAsync(output, input);
    if (environment.rank == 0) act(input, output);
    handle.Wait();
    if (environment.rank == 0 && HasMemory(input)) ExpectValues(output.add(input.sum()), {12, 14});
    ranks->Barrier();
  });
  return processes.Wait(0);
}

constexpr char kAborted[] = "signal 6";

TEST(GpuRanksWaitTest, OperationsOnOtherMemoryNeedNoWait) {
  EXPECT_EQ(EndOf([](const at::Tensor& input, const at::Tensor&) { input.add(1); }), "");
}

TEST(GpuRanksWaitTest, AWriteToWhatIsReducedEndsTheProcess) {
  EXPECT_EQ(EndOf([](const at::Tensor& input, const at::Tensor&) { input.zero_(); }), kAborted);
}

TEST(GpuRanksWaitTest, AUseOfTheResultBeforeTheWaitEndsTheProcess) {
  EXPECT_EQ(EndOf([](const at::Tensor&, const at::Tensor& output) { output.add(1); }), kAborted);
  EXPECT_EQ(EndOf([](const at::Tensor&, const at::Tensor& output) { output.zero_(); }), kAborted);
}

TEST(GpuRanksWaitTest, MemoryThatIsFreedBeforeTheWaitEndsTheProcess) {
  EXPECT_EQ(EndOf([](const at::Tensor& input, const at::Tensor&) { FreeMemory(input); }), kAborted);
}

// The host has waited for the copies of Gloo, which orders nothing: NCCL has none.
TEST(GpuRanksWaitTest, AWaitOfTheHostIsNone) {
  EXPECT_EQ(EndOf([](const at::Tensor& input, const at::Tensor&) {
              const c10::impl::VirtualGuardImpl device(at::kCUDA);
              device.synchronizeStream(device.getStream(input.device()));
              input.zero_();
            }),
            kAborted);
}

// The collectives of a step with one micro-batch for each rank, and those beside which others ran.
struct Share {
  int64_t gathers, reductions, beside;
};

Share ShareOfStep(const std::shared_ptr<Communicator>& ranks, const std::string& model, int stage,
                  bool overlap) {
  parallel::ZeroOptions options = parallel::ZeroOfStage(stage);
  options.overlap_comm = overlap;
  parallel::ZeroStrategy zero(options, ranks);
  parallel::Prepare(zero, model);
  ranks->ResetVolume();
  const int64_t before = TheCounts().of_groups_beside;
  parallel::Step(zero, /*micro_batches=*/2, /*seed=*/0);
  const CommunicationVolume volume = ranks->volume();
  return {.gathers = volume.all_gather.calls,
          .reductions = volume.reduce_scatter.calls,
          .beside = TheCounts().of_groups_beside - before};
}

// While a block runs, the next one is gathered, and the gradients of the one before are reduced. So
// there is nothing beside the first gathering of a step, and beside its last reduction at most the
// addition of the former one to this rank's gradients, which stage 1 does not have. Stages 1 and 2
// gather no block for a pass.
TEST(GpuRanksOverlapTest, WithOverlapAllButTheEndsOfCommunicationIsBesideComputation) {
  RunConnected(2, [](const std::shared_ptr<Communicator>& ranks) {
    const TemporaryFolder folder;
    WriteTinyModel(folder / "model", 3, {{"num_hidden_layers", 4}});
    const Share one = ShareOfStep(ranks, folder / "model", 1, /*overlap=*/true);
    EXPECT_EQ(one.reductions, 6);
    EXPECT_EQ(one.beside, one.reductions - 1);
    const Share two = ShareOfStep(ranks, folder / "model", 2, /*overlap=*/true);
    EXPECT_EQ(two.reductions, 6);
    EXPECT_EQ(two.beside, two.reductions);
    const Share three = ShareOfStep(ranks, folder / "model", 3, /*overlap=*/true);
    EXPECT_EQ(three.gathers, 10);
    EXPECT_EQ(three.beside, three.gathers + three.reductions - 1);
    for (const int stage : {1, 2, 3}) {
      EXPECT_EQ(ShareOfStep(ranks, folder / "model", stage, /*overlap=*/false).beside, 0) << stage;
    }
  });
}

}  // namespace
}  // namespace tandem::ranks
