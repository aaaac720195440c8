// Ranks that read new weights in memory of a sender's GPU, each rank and the sender in a process of
// its own; on a machine with a GPU, or on simulated ones.
#include "services/rollout/engine/ranks/shard_weights.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "common/base/struct_bytes.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/peer_memory.h"
#include "services/rollout/engine/models/senior_update.h"
#include "services/rollout/engine/models/torch_runner.h"

namespace tandem::rollout {
namespace {

constexpr int kSender = 2;  // beside the two ranks of the server

// The weights that the sender shares.
struct SharedWeights {
  GpuMemory memory;
  std::vector<WeightSpec> tensors;
};

class ShardWeightsOnGpuTest : public testing::Test {
 protected:
  ShardWeightsOnGpuTest() {
    const nlohmann::json sizes = {{"num_attention_heads", 8},
                                  {"num_key_value_heads", 4},
                                  {"intermediate_size", 48},
                                  {"vocab_size", 64}};
    WriteTinyModel(folder_ / "before", 1, sizes);
    WriteTinyModel(folder_ / "after", 2, sizes);
  }

  std::unique_ptr<Model> Load(const std::string& name, const Placement& placement) const {
    return Model::Load(folder_ / name, {.placement = placement}).value();
  }

  // Runs `serve` on the two ranks of a server, each with its group and placement, beside a sender
  // that gives the weights "after" and then calls `change` with their bytes.
  using Serve = std::function<void(ranks::ServerRanks& server, ranks::Communicator& group,
                                   const Placement& placement, const SharedWeights& weights)>;
  void Run(const std::function<void(at::Tensor& bytes)>& change, const Serve& serve) const {
    ranks::RunOnRanks(3, [&](const RankEnvironment& environment) {
      const auto server = ranks::ServerRanks::Connect({.environment = environment,
                                                       .timeouts = {.collective = absl::Minutes(1),
                                                                    .silence = absl::Seconds(5)}})
                              .value();
      ranks::Communicator& world = *server->world();
      const auto group = world.Split("senior", {{0, 1}});
      // Not before the processes part, where CUDA would be of no use to them.
      if (!at::hasCUDA()) return world.Barrier();
      const int gpus = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
      const at::Device gpu(at::kCUDA, static_cast<c10::DeviceIndex>(environment.rank % gpus));
      if (environment.rank == kSender) {
        SharedWeights shared;
        std::vector<at::Tensor> bytes;
        for (const auto& [name, tensor] : Load("after", {})->Parameters()) {
          shared.tensors.push_back({.name = name, .shape = tensor.sizes().vec()});
          bytes.push_back(tensor.contiguous().view(-1).view(at::kByte));
        }
        at::Tensor all = at::cat(bytes).to(gpu);
        Wait(gpu);
        shared.memory = ShareMemory(all).value();
        world.BroadcastBytes(ToBytes(shared), kSender);
        world.Barrier();
        change(all);
        Wait(gpu);
        world.Barrier();
        return world.Barrier();
      }
      const auto shared = FromBytes<SharedWeights>(world.BroadcastBytes("", kSender)).value();
      serve(*server, *group,
            {.device = gpu,
             .shard_index = environment.rank,
             .shard_count = 2,
             .shard_group = std::make_shared<ranks::CommunicatorGroup>(group)},
            shared);
      world.Barrier();
    });
  }

  static void Wait(at::Device gpu) {
    c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(gpu.index());
  }

  // Reads the weights on rank 0, lets the sender change them, and returns what the ranks then make
  // of them: rank 0's status, and true where the model has the weights `name` afterwards. With
  // `on_host` the first tensor came in messages.
  void ExpectUpdate(const std::function<void(at::Tensor& bytes)>& change, bool on_host,
                    absl::StatusCode expected, const std::string& message = "") const {
    Run(change, [&](ranks::ServerRanks& server, ranks::Communicator& group,
                    const Placement& placement, const SharedWeights& shared) {
      const auto model = Load("before", placement);
      const auto stream = TorchRunner::NewStream(placement.device);
      if (group.rank() == 0) {
        SeniorUpdate update(*model, nullptr, /*keeps_tensors=*/true, stream, nullptr);
        const auto memory = PeerMemory::Open({shared.memory}, placement.device).value();
        int64_t offset = 0;
        for (const WeightSpec& spec : shared.tensors) {
          if (on_host && offset == 0) {
            TensorBytes bytes(new std::byte[static_cast<size_t>(spec.bytes())]);
            const auto size = static_cast<size_t>(spec.bytes());
            ASSERT_TRUE(memory->Read(0, {bytes.get(), size}).ok());
            ASSERT_TRUE(update.Add(spec, std::move(bytes)).ok());
          } else {
            const SharedRange range = {.from = memory, .offset = offset, .size = spec.bytes()};
            ASSERT_TRUE(update.AddShared(spec, {range}).ok());
          }
          offset += spec.bytes();
        }
        ASSERT_TRUE(update.TakeRead().ok());
        ASSERT_EQ(update.tensors().size(), shared.tensors.size());
        for (const KeptTensor& kept : update.tensors()) {
          const bool first = kept.spec.name == shared.tensors[0].name;
          EXPECT_EQ(kept.values.defined(), on_host && first) << "no whole model on the host";
        }
        server.world()->Barrier();
        server.world()->Barrier();  // the sender changes its memory
        const RankedWeights weights = WeightsToSend(update.tensors(), *model);
        group.BroadcastBytes(ToBytes(weights), 0);
        const absl::Status sent = SendWeights(weights, update.tensors(), group);
        EXPECT_EQ(sent.code(), expected) << sent;
        EXPECT_TRUE(absl::StrContains(sent.message(), message)) << sent;
        if (sent.ok()) model->Adopt(*update.weights());
      } else {
        server.world()->Barrier();
        server.world()->Barrier();
        const auto weights = FromBytes<RankedWeights>(group.BroadcastBytes("", 0)).value();
        ShardUpdate update(weights, group, *model, server, stream);
        if (expected == absl::StatusCode::kOk) update.AdoptInto(*model);
      }
      const auto now = Load(expected == absl::StatusCode::kOk ? "after" : "before", placement);
      for (size_t i = 0; i < now->DeclaredParameters().size(); ++i) {
        EXPECT_TRUE(at::equal(model->DeclaredParameters()[i].ComputedValue().cpu(),
                              now->DeclaredParameters()[i].ComputedValue().cpu()))
            << now->DeclaredParameters()[i].spec.name;
      }
    });
  }

  const TemporaryFolder folder_;
};

void Nothing(at::Tensor&) {}

TEST_F(ShardWeightsOnGpuTest, EveryRankReadsItsShardInTheSendersMemory) {
  ExpectUpdate(Nothing, /*on_host=*/false, absl::StatusCode::kOk);
}

// A stream that broke goes on in messages.
TEST_F(ShardWeightsOnGpuTest, TensorsThatCameInMessagesAreSentByRankZero) {
  ExpectUpdate(Nothing, /*on_host=*/true, absl::StatusCode::kOk);
}

TEST_F(ShardWeightsOnGpuTest, MemoryThatChangesAfterItWasVerifiedLeavesTheOldWeights) {
  const auto change = [](at::Tensor& bytes) { bytes.narrow(0, bytes.numel() - 2, 1).add_(1); };
  for (const bool on_host : {false, true}) {
    ExpectUpdate(change, on_host, absl::StatusCode::kDataLoss, "rank 1: \"");
  }
}

}  // namespace
}  // namespace tandem::rollout
