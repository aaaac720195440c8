// Copies of weights in the GPUs of two ranks; with TANDEM_TEST_DEVICE=cuda alone.
#include "common/parallel/gpu_copies.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/create_strategy.h"
#include "common/parallel/testing/strategy_runs.h"
#include "common/parallel/testing/zero_of_stage.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/weights/gpu/copy_parts.h"
#include "common/weights/weight_snapshot.h"
#include "common/weights/weights_digest.h"

namespace tandem::parallel {
namespace {

using Source = std::shared_ptr<const WeightSource>;

constexpr int64_t kEnough = 1 << 24;
const nlohmann::json kSizes = {{"intermediate_size", 44}};

struct Layout {
  const char* name;
  StrategyOptions strategy;

  friend void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }
};

class GpuCopiesTest : public testing::TestWithParam<Layout> {
 protected:
  GpuCopiesTest() { WriteTinyModel(folder_ / "model", 3, kSizes); }

  // Runs `body` on two ranks with GPUs; the strategy holds the model.
  void Run(const std::function<void(Strategy& strategy, ranks::Communicator& ranks)>& body) const {
    ranks::RunConnected(2, [&](const std::shared_ptr<ranks::Communicator>& ranks) {
      if (ranks::DeviceOfTests().is_cpu()) return;
      const auto strategy = CreateStrategy(GetParam().strategy, ranks).value();
      Prepare(*strategy, folder_ / "model");
      body(*strategy, *ranks);
    });
  }

  // A manifest of the model, matrices in bfloat16 and some in both types, and of two heads.
  static WeightManifest Manifest(Strategy& strategy) {
    std::vector<WeightSpec> tensors;
    for (WeightSpec spec : strategy.model().SentSpecs()) {
      if (tensors.size() % 3 == 0) tensors.push_back(spec);
      if (!tensors.empty() && tensors.back() == spec && tensors.size() % 2 == 0) continue;
      spec.dtype = DType::kBFloat16;
      tensors.push_back(spec);
    }
    for (const auto& [name, head] : Heads(strategy)) {
      tensors.push_back({.name = name, .shape = head.sizes().vec()});
    }
    TensorSums frozen;
    const std::string digest = ParametersDigest(strategy, frozen).value();
    return ManifestOf(std::move(tensors), {.version = 3, .digest = digest}, 7,
                      {{.name = kSpeculatorComponent, .config = "{}", .digest = digest}});
  }

  static NamedTensors Heads(Strategy& strategy) {
    const auto options = at::device(strategy.model().device()).dtype(at::kFloat);
    return {{"speculator.a", at::arange(5, options)}, {"speculator.b", at::arange(3, options)}};
  }

  // Returns the same copy in a file, on rank 0.
  static Source InFile(Strategy& strategy, const WeightManifest& manifest) {
    Source source;
    const auto is_sent = [&](const Parameter& parameter) {
      return strategy.model().IsSent(parameter.spec);
    };
    const absl::Status made =
        UseWholeParameters(strategy, is_sent, [&](TensorSource parameters) -> absl::Status {
          auto copied = MakeWeightSnapshot(manifest, [&](TensorVisitor visit) {
            const absl::Status visited = parameters(visit);
            return visited.ok() ? SourceOf(Heads(strategy))(visit) : visited;
          });
          if (copied.ok()) source = *copied;
          return copied.status();
        });
    EXPECT_TRUE(made.ok()) << made;
    return source;
  }

  static std::vector<std::byte> BytesOf(const Source& source) {
    std::vector<std::byte> bytes(static_cast<size_t>(source->manifest().total_bytes));
    EXPECT_TRUE(source->Read(0, absl::MakeSpan(bytes)).ok());
    return bytes;
  }

  const TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, GpuCopiesTest,
    testing::Values(Layout{"zero_1", {.name = "zero", .zero = ZeroOfStage(1)}},
                    Layout{"zero_3", {.name = "zero", .zero = ZeroOfStage(3)}},
                    Layout{"tensor_2",
                           {.name = "megatron", .megatron = {.tensor_model_parallel_size = 2}}},
                    Layout{"pipeline_2",
                           {.name = "megatron", .megatron = {.pipeline_model_parallel_size = 2}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(GpuCopiesTest, EachRankKeepsAPartOfWhatAFileHas) {
  Run([](Strategy& strategy, ranks::Communicator& ranks) {
    const WeightManifest manifest = Manifest(strategy);
    GpuCopies copies(strategy, LargestPartBytes(manifest.tensors, 2));
    for (int round = 0; round < 2; ++round) {
      ASSERT_TRUE(copies.Reserve(manifest.tensors).ok());
      const auto source = copies.Fill(manifest, Heads(strategy));
      ASSERT_TRUE(source.ok()) << source.status();
      const Source file = InFile(strategy, manifest);
      if (ranks.rank() > 0) {
        EXPECT_EQ(*source, nullptr);
        continue;
      }
      ASSERT_EQ((*source)->gpu_memories().size(), 2U);
      EXPECT_LE((*source)->gpu_memories()[0].size, LargestPartBytes(manifest.tensors, 2));
      EXPECT_EQ((*source)->manifest(), file->manifest());
      EXPECT_TRUE(std::ranges::equal((*source)->sums(), file->sums()));
      EXPECT_EQ(BytesOf(*source), BytesOf(file));
    }
  });
}

TEST_P(GpuCopiesTest, ACopyThatIsReadIsNotReplaced) {
  WriteTinyModel(folder_ / "other", 4, kSizes);
  Run([&](Strategy& strategy, ranks::Communicator& ranks) {
    const WeightManifest manifest = Manifest(strategy);
    GpuCopies copies(strategy, kEnough);
    ASSERT_TRUE(copies.Reserve(manifest.tensors).ok());
    Source source = copies.Fill(manifest, Heads(strategy)).value();
    const Source before = InFile(strategy, manifest);
    ASSERT_TRUE(strategy.LoadParameters(Model::Load(folder_ / "other").value()->Parameters()).ok());
    const WeightManifest next = Manifest(strategy);
    EXPECT_NE(next.digest, manifest.digest);
    // A publication goes on.
    EXPECT_EQ(copies.Reserve(next.tensors).code(), absl::StatusCode::kResourceExhausted);
    std::vector<GpuMemory> memories;
    if (ranks.rank() == 0) {
      EXPECT_EQ(BytesOf(source), BytesOf(before));
      memories = {source->gpu_memories().begin(), source->gpu_memories().end()};
    }
    source = nullptr;
    ASSERT_TRUE(copies.Reserve(next.tensors).ok());
    source = copies.Fill(next, Heads(strategy)).value();
    const Source after = InFile(strategy, next);
    if (ranks.rank() == 0) {
      EXPECT_EQ(BytesOf(source), BytesOf(after));
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(source->gpu_memories()[i].handle, memories[i].handle) << "is used again";
      }
    }
  });
}

TEST_P(GpuCopiesTest, WithoutPlaceOnOneRankThereIsNoCopy) {
  Run([](Strategy& strategy, ranks::Communicator& ranks) {
    const WeightManifest manifest = Manifest(strategy);
    GpuCopies copies(strategy, ranks.rank() == 0 ? kEnough : 10);
    const absl::Status reserved = copies.Reserve(manifest.tensors);
    EXPECT_EQ(reserved.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(reserved.message().substr(0, 8), "rank 1: ") << reserved;
  });
}

TEST_P(GpuCopiesTest, OtherWeightsThanTheVersionsAreAnErrorOnAllRanks) {
  Run([](Strategy& strategy, ranks::Communicator&) {
    WeightManifest manifest = Manifest(strategy);
    manifest.digest = std::string(32, '0');
    GpuCopies copies(strategy, kEnough);
    ASSERT_TRUE(copies.Reserve(manifest.tensors).ok());
    EXPECT_EQ(copies.Fill(manifest, Heads(strategy)).status().code(), absl::StatusCode::kDataLoss);
    EXPECT_TRUE(copies.Reserve(manifest.tensors).ok()) << "the ranks are in step";
  });
}

}  // namespace
}  // namespace tandem::parallel
