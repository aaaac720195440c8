// The waits of the host for a GPU, and the launches of a pass.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "common/coauthoring/tandem_config.h"
#include "common/model/testing/cached_sequences.h"
#include "common/model/testing/models.h"
#include "common/ops/products/fixed_rows.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/kernels.h"

namespace tandem::rollout {
namespace {

using simulated_gpu::TheCounts;

const at::Device kGpu(at::kCUDA, 0);

struct Costs {
  int64_t launches, synchronizations;
};

template <typename Function>
Costs CostsOf(const Function& fn) {
  const int64_t launches = TheCounts().launches, waits = TheCounts().synchronizations;
  fn();
  return {TheCounts().launches - launches, TheCounts().synchronizations - waits};
}

// Sequences of different lengths that a model on the GPU continues.
class Sequences {
 public:
  Sequences(const std::string& family, int64_t count, at::ScalarType type)
      : runner_(TinyModel(family, {}, {.placement = {.device = kGpu, .dtype = type}}),
                /*num_blocks=*/2 * count, type == at::kFloat ? DType::kFloat32 : DType::kBFloat16) {
    for (int32_t i = 0; i < count; ++i) blocks_.push_back({2 * i, 2 * i + 1});
    starts_.resize(blocks_.size());
  }

  // Consumes the given numbers of tokens, and draws after the last one of each sequence.
  Costs Run(const std::vector<int64_t>& lengths) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<std::vector<int64_t>> wanted;
    for (const int64_t length : lengths) {
      tokens.emplace_back(length, 7);
      wanted.push_back({length - 1});
    }
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < lengths.size(); ++i) {
      inputs.push_back({.blocks = blocks_[i],
                        .start = starts_[i],
                        .tokens = tokens[i],
                        .output_rows = wanted[i]});
      starts_[i] += lengths[i];
    }
    const std::vector<OutputRow> rows(lengths.size(), {.u = 0.3, .sampling = &sampling_});
    return CostsOf([&] {
      const absl::Status status =
          runner_.Run({.copies = {}, .sequences = inputs, .rows = rows}, results_);
      EXPECT_TRUE(status.ok()) << status;
    });
  }

 private:
  const SamplingParams sampling_;
  std::vector<std::vector<int32_t>> blocks_;
  std::vector<int64_t> starts_;
  TorchRunner runner_;
  PassResults results_;
};

// 1, 2, 3, …: sequences of different lengths.
std::vector<int64_t> Lengths(int64_t count) {
  std::vector<int64_t> lengths(static_cast<size_t>(count));
  std::iota(lengths.begin(), lengths.end(), 1);
  return lengths;
}

// A prompt of each sequence, one more token of each, and three, as where drafts are verified.
std::vector<Costs> PassesOf(const std::string& family, int64_t count,
                            at::ScalarType type = at::kBFloat16) {
  Sequences sequences(family, count, type);
  return {sequences.Run(Lengths(count)), sequences.Run(std::vector<int64_t>(count, 1)),
          sequences.Run(std::vector<int64_t>(count, 3))};
}

// The host reads how many rows each expert of a layer has, where ATen groups them.
int64_t ExpertLayers(const std::string& family) {
  return TinyConfig(family).RoutingLayout().layers;
}

// ATen's attention with a soft cap loops over sequences.
bool AttendsTogether(const std::string& family) {
  return !TinyConfig(family).decoder.attention_soft_cap.has_value();
}

TEST(GpuPassesTest, TheHostWaitsOnceForAPass) {
  for (const std::string& family : EveryFamily()) {
    for (const int64_t count : {1, 20}) {
      for (const Costs& pass : PassesOf(family, count)) {
        EXPECT_EQ(pass.synchronizations, 1 + ExpertLayers(family)) << family << " " << count;
      }
    }
  }
}

TEST(GpuPassesTest, APassLaunchesAsMuchForManySequencesAsForOne) {
  for (const std::string& family : EveryFamily()) {
    if (!AttendsTogether(family)) continue;
    const std::vector<Costs> one = PassesOf(family, 1), many = PassesOf(family, 20);
    for (size_t i = 0; i < one.size(); ++i) {
      // Where a row of each sequence is wanted they are selected; a sequence of one row is all.
      EXPECT_NEAR(many[i].launches, one[i].launches, 4) << family << ", pass " << i;
    }
  }
}

// With the kernels, soft caps and float32 attend together, too. ATen pads prompts of latent
// attention in float32, single rows apart from others: three sequences have both.
TEST(GpuPassesTest, WithKernelsEveryPassLaunchesAsMuchForManySequencesAsForOne) {
  const simulated_gpu::WithKernels kernels;
  for (const std::string& family : EveryFamily()) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const bool pads = type == at::kFloat && TinyConfig(family).decoder.latent.has_value();
      const int64_t few = pads ? 3 : 1, more = pads ? 12 : 3;
      const std::vector<Costs> one = PassesOf(family, few, type);
      const std::vector<Costs> many = PassesOf(family, more, type);
      for (size_t i = 0; i < one.size(); ++i) {
        EXPECT_NEAR(many[i].launches, one[i].launches, 4)
            << family << " " << type << ", pass " << i;
        EXPECT_EQ(many[i].synchronizations, 1) << family << " " << type;
      }
    }
  }
}

// The hidden states of a prompt, of its next token, and of a draft beside another prompt, in
// float32.
at::Tensor CachedStates(const std::string& family) {
  const c10::InferenceMode inference_mode;
  const auto model = TinyModel(family, {}, {.placement = {.device = kGpu, .dtype = at::kFloat}});
  CachedSequences sequences(*model, /*count=*/2, /*max_tokens=*/64);
  std::vector<int64_t> tokens(24);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i * i % 60);
  const absl::Span<const int64_t> all(tokens);
  std::vector<at::Tensor> states;
  const auto run = [&](const std::vector<CachedSequences::Input>& inputs) {
    states.push_back(sequences.Decode(inputs).value().cpu());
  };
  run({{.sequence = 0, .tokens = all.first(20), .num_output_rows = 20}});
  run({{.sequence = 0, .tokens = all.subspan(20, 1)}});
  run({{.sequence = 0, .tokens = all.subspan(21), .num_output_rows = 3},
       {.sequence = 1, .tokens = all.first(9), .num_output_rows = 9}});
  return at::cat(states);
}

// Returns the numbers of rows of the matrix products that fn() computes.
template <typename Function>
std::set<int64_t> ProductRows(const Function& fn) {
  thread_local std::set<int64_t> rows;
  rows.clear();
  const at::CallbackHandle callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& operation)
                                     -> std::unique_ptr<at::ObserverContext> {
        const std::string_view name = operation.name();
        for (const char* product : {"aten::mm", "aten::addmm", "aten::linear", "aten::matmul"}) {
          if (name == product) {
            rows.insert(operation.inputs()[name == "aten::addmm" ? 1 : 0].toTensor().size(0));
          }
        }
        return nullptr;
      })
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION}));
  fn();
  at::removeCallback(callback);
  return rows;
}

// Linear maps with and without bias, routers and heads: every product of a pass has the same number
// of rows.
TEST(GpuPassesTest, EveryProductHasTheRowsOfTheSetting) {
  const simulated_gpu::WithKernels kernels;
  const absl::Cleanup reset = [] { ops::SetProductRows(0); };
  for (const std::string family : {"qwen2", "qwen3_moe"}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rows : {0, 8}) {
        ops::SetProductRows(rows);
        const std::set<int64_t> found = ProductRows([&] { PassesOf(family, /*count=*/5, type); });
        if (rows == 0) {
          EXPECT_GT(found.size(), 1) << family;
        } else {
          EXPECT_EQ(found, std::set<int64_t>{rows}) << family;
        }
      }
    }
  }
}

// The simulated GPUs have no cuBLAS: this is what libtorch would tell it.
TEST(GpuPassesTest, ProductsOfFixedRowsDoNotDivideTheirSums) {
  const absl::Cleanup reset = [] { ops::SetProductRows(0); };
  at::Context& context = at::globalContext();
  ops::SetProductRows(256);
  EXPECT_EQ(context.allowBF16ReductionCuBLAS(),
            at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
  EXPECT_EQ(context.blasPreferredBackend(), at::BlasBackend::Cublaslt);
  ops::SetProductRows(0);
  EXPECT_EQ(context.allowBF16ReductionCuBLAS(),
            at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK);
  EXPECT_EQ(context.blasPreferredBackend(), at::BlasBackend::Cublas);
}

// The states are those of whole products but for their rounding.
TEST(GpuPassesTest, ProductsOfFixedRowsChangeRoundingAlone) {
  const absl::Cleanup reset = [] { ops::SetProductRows(0); };
  for (const std::string& family : EveryFamily()) {
    const at::Tensor whole = CachedStates(family);
    ops::SetProductRows(7);
    const at::Tensor apart = (CachedStates(family) - whole).norm();
    ops::SetProductRows(0);
    EXPECT_LE((apart / whole.norm()).item<double>(), 1e-6) << family;
  }
}

TEST(GpuPassesTest, KernelsChangeRoundingAloneInPassesWithACache) {
  for (const std::string& family : EveryFamily()) {
    const at::Tensor with_aten = CachedStates(family);
    const simulated_gpu::WithKernels kernels;
    const at::Tensor apart = (CachedStates(family) - with_aten).norm();
    EXPECT_GT(apart.item<double>(), 0) << family;  // the kernels ran
    EXPECT_LE((apart / with_aten.norm()).item<double>(), 1e-6) << family;
  }
}

// The logits of a prompt.
at::Tensor Logits(const std::string& family) {
  const c10::InferenceMode inference_mode;
  const auto model = TinyModel(family, {}, {.placement = {.device = kGpu, .dtype = at::kBFloat16}});
  CausalContext context;
  return model
      ->ForwardLogits(model->HiddenStates(MakeRaggedBatch({{5, 9, 3, 60, 7}}, kGpu), context))
      .cpu();
}

TEST(GpuPassesTest, KernelsChangeLaunchesAndRoundingAlone) {
  for (const std::string& family : EveryFamily()) {
    if (ExpertLayers(family) > 0) continue;  // rounding decides which experts a token takes
    at::Tensor with_aten, with_kernels;
    const Costs aten = CostsOf([&] { with_aten = Logits(family); });
    const Costs own = CostsOf([&] {
      const simulated_gpu::WithKernels kernels;
      with_kernels = Logits(family);
    });
    EXPECT_LT(own.launches, aten.launches * 3 / 4) << family;
    const at::Tensor apart = (with_kernels - with_aten).to(at::kFloat).norm();
    EXPECT_LE((apart / with_aten.to(at::kFloat).norm()).item<double>(), 0.03) << family;
  }
}

// The forward and backward pass of sequences of different lengths.
Costs TrainingPass(const std::string& family, int64_t count, at::ScalarType type = at::kBFloat16) {
  const auto model =
      TinyModel(family, {}, {.requires_grad = true, .placement = {.device = kGpu, .dtype = type}});
  std::vector<std::vector<int64_t>> tokens;
  for (const int64_t length : Lengths(count)) tokens.emplace_back(length, 7);
  return CostsOf([&] {
    CausalContext context;
    model->HiddenStates(MakeRaggedBatch(tokens, kGpu), context).sum().backward();
  });
}

TEST(GpuPassesTest, TrainingWaitsForNothing) {
  for (const std::string& family : EveryFamily()) {
    // ATen's operations group the rows of experts on the host.
    EXPECT_EQ(TrainingPass(family, 20).synchronizations, ExpertLayers(family)) << family;
    const simulated_gpu::WithKernels kernels;
    EXPECT_EQ(TrainingPass(family, 20).synchronizations, 0) << family;
    EXPECT_EQ(TrainingPass(family, 20, at::kFloat).synchronizations, 0) << family;
  }
}

TEST(GpuPassesTest, TrainingLaunchesAsMuchForManySequencesAsForOne) {
  for (const std::string& family : EveryFamily()) {
    if (!AttendsTogether(family)) continue;
    EXPECT_NEAR(TrainingPass(family, 20).launches, TrainingPass(family, 1).launches, 4) << family;
  }
}

// In float32, and with a soft cap, ATen attends to padded sequences: the lengths of three and of
// twelve sequences are of one class.
TEST(GpuPassesTest, TrainingOfPaddedSequencesLaunchesAsMuchForManyAsForFew) {
  const simulated_gpu::WithKernels kernels;
  for (const std::string& family : EveryFamily()) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      EXPECT_NEAR(TrainingPass(family, 12, type).launches, TrainingPass(family, 3, type).launches,
                  4)
          << family << " " << type;
    }
  }
}

// The gradients of the model's parameters, by name.
std::map<std::string, at::Tensor> Gradients(const std::string& family) {
  const auto model = TinyModel(
      family, {}, {.requires_grad = true, .placement = {.device = kGpu, .dtype = at::kFloat}});
  CausalContext context;
  const at::Tensor states = model->HiddenStates(
      MakeRaggedBatch({{5, 9, 3, 60, 7}, {4, 8, 15, 16, 23, 42}}, kGpu), context);
  (states * at::linspace(-1, 1, states.numel(), kGpu).view_as(states)).sum().backward();
  std::map<std::string, at::Tensor> gradients;
  for (const Parameter& parameter : model->DeclaredParameters()) {
    if (parameter.trainable && parameter.value.grad().defined()) {
      gradients[parameter.spec.name] = parameter.value.grad().cpu();
    }
  }
  return gradients;
}

TEST(GpuPassesTest, KernelsChangeRoundingAloneInTheGradientsOfExperts) {
  for (const std::string& family : EveryFamily()) {
    if (ExpertLayers(family) == 0) continue;
    const std::map<std::string, at::Tensor> with_aten = Gradients(family);
    const simulated_gpu::WithKernels kernels;
    const std::map<std::string, at::Tensor> with_kernels = Gradients(family);
    for (const auto& [name, gradient] : with_kernels) {
      // With ATen's operations experts that no token chose have none.
      const auto found = with_aten.find(name);
      const at::Tensor expected =
          found == with_aten.end() ? at::zeros_like(gradient) : found->second;
      EXPECT_LE((gradient - expected).norm().item<double>(),
                2e-6 * (1 + expected.norm().item<double>()))
          << family << " " << name;
    }
    EXPECT_GE(with_kernels.size(), with_aten.size());
  }
}

}  // namespace
}  // namespace tandem::rollout
