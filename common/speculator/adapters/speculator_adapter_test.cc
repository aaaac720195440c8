// Adapters: what they make, learn, write and refuse; the same for the kinds of this folder and for
// one that registers itself.
#include "common/speculator/adapters/speculator_adapter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "common/base/errors/error.h"
#include "common/base/files/atomic_file.h"
#include "common/speculator/speculator_files.h"
#include "common/tensor/aten/tensor_copies.h"

namespace tandem::speculator {
namespace {

namespace fs = std::filesystem;

constexpr BaseModelSizes kBase = {.hidden_size = 8, .vocab_size = 16, .num_token_ids = 13};

std::unique_ptr<SpeculatorAdapter> Attached(const SpeculatorSettings& settings,
                                            const BaseModelSizes& base = kBase) {
  auto adapter = std::move(MakeSpeculatorAdapter(settings.adapter, "adapter")).value();
  const absl::Status built = adapter->BuildAndAttach(settings, base, at::kCPU);
  EXPECT_TRUE(built.ok()) << built;
  return adapter;
}

absl::Status Refusal(const SpeculatorSettings& settings, const BaseModelSizes& base = kBase) {
  auto adapter = MakeSpeculatorAdapter(settings.adapter, "adapter");
  if (!adapter.ok()) return adapter.status();
  return (*adapter)->BuildAndAttach(settings, base, at::kCPU);
}

SpeculatorBatch RandomBatch() {
  at::manual_seed(5);
  SpeculatorBatch batch = {.hidden = at::randn({14, kBase.hidden_size}),
                           .tokens = at::randint(kBase.num_token_ids, {14}, at::kLong),
                           .sequences = PackedSequences({0, 8, 14}),
                           .labels = {}};
  for (int64_t t = 0; t < 14; ++t) batch.labels.push_back(batch.tokens[t].item<int64_t>());
  return batch;
}

class SpeculatorAdapterTest : public testing::TestWithParam<std::string> {
 protected:
  SpeculatorAdapterTest() {
    directory_ = fs::path(testing::TempDir()) / "speculator_adapter" / GetParam() /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  static SpeculatorSettings Settings() {
    return {.adapter = GetParam(), .seed = 3, .n_predict = 2};
  }

  fs::path directory_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, SpeculatorAdapterTest,
                         testing::Values("mlp", "arctic_lstm", "eagle"),
                         [](const auto& info) { return info.param; });

TEST_P(SpeculatorAdapterTest, TheLossFallsAndNoGradientReachesTheBaseModel) {
  const auto adapter = Attached(Settings());
  SpeculatorBatch batch = RandomBatch();
  batch.hidden.requires_grad_(true);
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    for (const SpeculatorParameter& parameter : adapter->speculator().parameters()) {
      at::Tensor value = parameter.value;
      value.mutable_grad() = at::zeros_like(value);
    }
    const auto report = adapter->ComputeSpeculatorLoss(batch, {});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_FALSE(batch.hidden.grad().defined());
    (step == 0 ? first : last) = report->loss;
    // Descent by the sign of the gradient.
    const at::NoGradGuard no_grad;
    for (const SpeculatorParameter& parameter : adapter->speculator().parameters()) {
      at::Tensor value = parameter.value;
      value.sub_(0.01 * value.grad().sign());
    }
  }
  EXPECT_LT(last, 0.5 * first);
}

TEST_P(SpeculatorAdapterTest, ACheckpointIsLoadedAloneAndByTheAdapter) {
  const auto adapter = Attached(Settings());
  ASSERT_TRUE(adapter->SaveCheckpoint(directory_).ok());
  // A copy writes the same files, whatever the speculator has become.
  TensorCopies copies;
  copies.Begin();
  const auto write = adapter->CopyCheckpoint(copies);
  ASSERT_TRUE(write.ok() && copies.Finish().ok()) << write.status();
  const std::vector<at::Tensor> values = [&] {
    std::vector<at::Tensor> clones;
    for (const SpeculatorParameter& parameter : adapter->speculator().parameters()) {
      clones.push_back(parameter.value.detach().clone());
      parameter.value.detach().zero_();
    }
    return clones;
  }();
  ASSERT_TRUE((*write)(directory_ / "copy").ok());
  for (const char* const file : {"config.json", "model.safetensors"}) {
    EXPECT_EQ(*ReadFile(directory_ / kCheckpointFolder / file),
              *ReadFile(directory_ / "copy" / kCheckpointFolder / file));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    adapter->speculator().parameters()[i].value.detach().copy_(values[i]);
  }
  const auto alone = LoadSpeculator(directory_ / kCheckpointFolder, {.num_token_ids = 13});
  ASSERT_TRUE(alone.ok()) << alone.status();
  SpeculatorSettings other_seed = Settings();
  other_seed.seed = 4;
  const auto other = Attached(other_seed);
  const auto equal = [](const Speculator& a, const Speculator& b) {
    bool all = a.parameters().size() == b.parameters().size();
    for (size_t i = 0; all && i < a.parameters().size(); ++i) {
      all = at::equal(a.parameters()[i].value, b.parameters()[i].value);
    }
    return all;
  };
  EXPECT_TRUE(equal(**alone, adapter->speculator()));
  EXPECT_FALSE(equal(other->speculator(), adapter->speculator()));
  ASSERT_TRUE(other->LoadCheckpoint(directory_).ok());
  EXPECT_TRUE(equal(other->speculator(), adapter->speculator()));
  const auto of_path =
      Attached({.adapter = GetParam(), .path = (directory_ / kCheckpointFolder).string()});
  EXPECT_TRUE(equal(of_path->speculator(), adapter->speculator()));
  // The values of the start, whatever was learnt since.
  const auto initial = other->ReadInitial();
  ASSERT_TRUE(initial.ok()) << initial.status();
  EXPECT_TRUE(equal(**initial, Attached(other_seed)->speculator()));
}

TEST_P(SpeculatorAdapterTest, AnotherSpeculatorsCheckpointIsRefusedByName) {
  const auto adapter = Attached(Settings());
  EXPECT_TRUE(absl::IsNotFound(adapter->LoadCheckpoint(directory_)));
  SpeculatorSettings longer = Settings();
  longer.n_predict = 3;
  ASSERT_TRUE(Attached(longer)->SaveCheckpoint(directory_).ok());
  const at::Tensor before = adapter->speculator().Value(HeadName(0)).detach().clone();
  const absl::Status steps = adapter->LoadCheckpoint(directory_);
  EXPECT_EQ(FieldPath(steps), "path");
  EXPECT_TRUE(absl::StrContains(steps.message(), "n_predict")) << steps;
  BaseModelSizes wider = kBase;
  wider.vocab_size = 24;
  ASSERT_TRUE(Attached(Settings(), wider)->SaveCheckpoint(directory_).ok());
  const absl::Status shape = adapter->LoadCheckpoint(directory_);
  EXPECT_TRUE(absl::StrContains(shape.message(), "tensor '")) << shape;
  ASSERT_TRUE(adapter->SaveCheckpoint(directory_).ok());
  fs::resize_file(directory_ / kCheckpointFolder / "model.safetensors", 40);
  EXPECT_FALSE(adapter->LoadCheckpoint(directory_).ok());
  fs::remove(directory_ / kCheckpointFolder / "config.json");
  EXPECT_TRUE(absl::IsDataLoss(adapter->LoadCheckpoint(directory_)));
  EXPECT_TRUE(at::equal(adapter->speculator().Value(HeadName(0)), before));
}

TEST_P(SpeculatorAdapterTest, ValuesThatAreNotFiniteAreRefusedByName) {
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    const auto adapter = Attached(Settings());
    {
      const at::NoGradGuard no_grad;
      const auto& parameters = adapter->speculator().parameters();
      const auto once = std::find_if(parameters.begin(), parameters.end(),
                                     [](const auto& found) { return found.repeats.empty(); });
      once->value.view(-1)[1] = value;
    }
    ASSERT_TRUE(adapter->SaveCheckpoint(directory_).ok());
    const absl::Status refused =
        Refusal({.adapter = GetParam(), .path = (directory_ / kCheckpointFolder).string()});
    EXPECT_EQ(FieldPath(refused), "path") << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "tensor '")) << refused;
    const absl::Status damaged = Attached(Settings())->LoadCheckpoint(directory_);
    EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
    fs::remove_all(directory_ / kCheckpointFolder);
  }
}

TEST_P(SpeculatorAdapterTest, SizesOfTheBaseModelAreChecked) {
  ASSERT_TRUE(Attached(Settings())->SaveCheckpoint(directory_).ok());
  const SpeculatorSettings of_path = {.adapter = GetParam(),
                                      .path = (directory_ / kCheckpointFolder).string()};
  BaseModelSizes other = kBase;
  other.hidden_size = 6;
  EXPECT_EQ(FieldPath(Refusal(of_path, other)), "path");
  other = kBase;
  other.num_token_ids = other.vocab_size = 17;
  EXPECT_TRUE(absl::StartsWith(FieldPath(Refusal(of_path, other)).value_or(""), "path."));
  SpeculatorSettings both = of_path;
  both.n_predict = 2;
  EXPECT_EQ(FieldPath(Refusal(both)), "n_predict");
  const auto count = CountSpeculatorValues(of_path, kBase);
  ASSERT_TRUE(count.ok()) << count.status();
  EXPECT_EQ(*count, Attached(Settings())->speculator().buffer().numel());
}

TEST(SpeculatorAdapter, RefusesSettingsByName) {
  const auto path_of = [](const SpeculatorSettings& settings) {
    return FieldPath(Refusal(settings)).value_or("");
  };
  EXPECT_EQ(path_of({.adapter = "medusa"}), "adapter");
  EXPECT_EQ(path_of({.adapter = "mlp", .proj_dim = 8}), "proj_dim");
  EXPECT_EQ(path_of({.adapter = "mlp", .emb_dim = 7}), "emb_dim");
  EXPECT_EQ(path_of({.adapter = "mlp", .method = "sum_lstm"}), "method");
  EXPECT_EQ(path_of({.adapter = "mlp", .n_predict = 1000}), "n_predict");
  EXPECT_EQ(path_of({.adapter = "arctic_lstm", .method = "sum_gru"}), "method");
  EXPECT_EQ(path_of({.adapter = "arctic_lstm", .method = "sum_lstm"}), "tie_weights");
  EXPECT_EQ(path_of({.adapter = "arctic_lstm", .emb_dim = 4}), "emb_dim");
}

}  // namespace
}  // namespace tandem::speculator
