// Models with low-rank adapters, of every family.
#include "common/model/config/lora.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/model/loading/merged_adapters.h"
#include "common/model/loading/peft_files.h"
#include "common/model/model.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/model/testing/cached_sequences.h"
#include "common/model/testing/models.h"
#include "common/model/testing/packed_model.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/ops/linear/low_rank_adapter.h"
#include "common/ops/testing/aten_kernels.h"

namespace tandem {
namespace {

using Tokens = std::vector<int64_t>;

const Tokens kTokens = {5, 17, 3, 44, 9, 21, 8, 30, 2, 11};

LoadOptions Adapted(bool requires_grad = false) {
  return {.requires_grad = requires_grad,
          .lora = {.rank = 3, .alpha = 5, .target_modules = {kAllLinear}, .seed = 4}};
}

at::Tensor Logits(const Model& model) {
  CausalContext causal;
  return model.ForwardLogits(model.HiddenStates(MakeRaggedBatch({kTokens}), causal));
}

// Gives the B of adapters, which are 0 at first, values.
void FillAdapters(const Model& model, uint64_t seed = 9) {
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (!parameter.spec.adapts) continue;
    at::Tensor values = parameter.value.detach();
    values.copy_(at::empty(values.sizes(), at::kFloat).normal_(0, 0.2, generator));
  }
}

// Returns the parameters of the same model without adapters, in which they are merged.
NamedTensors Merged(const Model& model) {
  const at::NoGradGuard no_grad;
  NamedTensors merged;
  EXPECT_TRUE(VisitMerged(model.lora(), SourceOf(model.Parameters()),
                          [&](const std::string& name, const at::Tensor& tensor) {
                            merged.emplace_back(name, tensor.clone());
                            return absl::OkStatus();
                          })
                  .ok());
  return merged;
}

// The ways to compute: by default, with ATen's operations as on a GPU, or with those in bfloat16.
struct Numerics {
  bool aten;
  at::ScalarType dtype;
  // Largest norm of the difference of two results, relative to their norm.
  double tolerance;
};
const Numerics kNumerics[] = {{.aten = false, .dtype = at::kFloat, .tolerance = 1e-5},
                              {.aten = true, .dtype = at::kFloat, .tolerance = 1e-5},
                              {.aten = true, .dtype = at::kBFloat16, .tolerance = 0.05}};

LoadOptions Of(const Numerics& numerics, LoadOptions options = {}) {
  options.placement.dtype = numerics.dtype;
  return options;
}

// Returns the norm of the difference relative to that of `expected`.
double Distance(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor whole = expected.to(at::kDouble);
  return ((found.to(at::kDouble) - whole).norm() / whole.norm()).item<double>();
}

// Whether the results of two such models may differ because their routers choose other experts.
bool MayRouteApart(const Numerics& numerics, const Model& model) {
  return numerics.dtype == at::kBFloat16 &&
         std::ranges::any_of(model.DeclaredParameters(), [](const Parameter& parameter) {
           return absl::StrContains(parameter.spec.name, ".experts.");
         });
}

class LoraModelTest : public ::testing::TestWithParam<std::string> {};

TEST_P(LoraModelTest, AdaptersAddTheirProductsAndComeOff) {
  const at::NoGradGuard no_grad;
  for (const Numerics& numerics : kNumerics) {
    std::optional<ops::AtenKernels> aten;
    if (numerics.aten) aten.emplace();
    const auto base = TinyModel(GetParam(), {}, Of(numerics));
    const auto model = TinyModel(GetParam(), {}, Of(numerics, Adapted()));
    EXPECT_TRUE(at::equal(Logits(*model), Logits(*base)));  // B is 0
    FillAdapters(*model);
    const at::Tensor adapted = Logits(*model);
    {
      const ops::WithoutAdapters without;
      EXPECT_TRUE(at::equal(Logits(*model), Logits(*base)));
    }
    EXPECT_TRUE(at::equal(Logits(*model), adapted));
    EXPECT_GT(Distance(Logits(*base), adapted), 10 * numerics.tolerance);
    if (MayRouteApart(numerics, *model)) continue;
    const auto merged = TinyModel(GetParam(), {}, Of(numerics));
    ASSERT_TRUE(merged->LoadParameters(Merged(*model)).ok());
    EXPECT_LT(Distance(adapted, Logits(*merged)), numerics.tolerance);
  }
}

// The gradient of a merged weight W + s B A is G: that of A is s Bᵀ G, that of B is s G Aᵀ.
TEST_P(LoraModelTest, GradientsAreThoseOfTheMergedWeights) {
  for (const Numerics& numerics : kNumerics) {
    std::optional<ops::AtenKernels> aten;
    if (numerics.aten) aten.emplace();
    const auto model = TinyModel(GetParam(), {}, Of(numerics, Adapted(/*requires_grad=*/true)));
    if (MayRouteApart(numerics, *model)) continue;
    FillAdapters(*model);
    model->OnWeightsChanged();
    const auto merged = TinyModel(GetParam(), {}, Of(numerics, {.requires_grad = true}));
    ASSERT_TRUE(merged->LoadParameters(Merged(*model)).ok());
    merged->OnWeightsChanged();
    for (const Model* each : {model.get(), merged.get()}) {
      (Logits(*each).log_softmax(1).square().mean()).backward();
    }
    std::vector<at::Tensor> found, expected;
    for (const Parameter& parameter : model->DeclaredParameters()) {
      if (!parameter.spec.adapts) {
        EXPECT_FALSE(parameter.value.grad().defined()) << parameter.spec.name;
        continue;
      }
      EXPECT_EQ(parameter.value.scalar_type(), at::kFloat);
      const std::string map(AdaptedMap(parameter.spec.name));
      const at::Tensor whole = merged->Parameter(absl::StrCat(map, ".weight")).grad();
      if (!whole.defined()) continue;  // an expert that no token chose
      const at::Tensor gradient = whole.to(at::kDouble) * model->lora().scale();
      const bool is_a = parameter.spec.name.ends_with("lora_A.weight");
      const at::Tensor other =
          model->Parameter(absl::StrCat(map, is_a ? ".lora_B.weight" : ".lora_A.weight"))
              .detach()
              .to(at::kDouble);
      found.push_back(parameter.value.grad().to(at::kDouble).flatten());
      expected.push_back((is_a ? other.t().mm(gradient) : gradient.mm(other.t())).flatten());
      EXPECT_LE((found.back() - expected.back()).norm().item<double>(),
                100 * numerics.tolerance * expected.back().norm().item<double>() + 1e-9)
          << parameter.spec.name;
    }
    EXPECT_GT(found.size(), 8u);
    EXPECT_LT(Distance(at::cat(found), at::cat(expected)), numerics.tolerance);
  }
}

// A rollout server, token by token, computes the bits of a trainer.
TEST_P(LoraModelTest, DecodingHasTheBitsOfTraining) {
  const auto model = TinyModel(GetParam(), {}, Adapted());
  const auto trained = TinyModel(GetParam(), {}, Adapted(/*requires_grad=*/true));
  FillAdapters(*model);
  FillAdapters(*trained);
  CausalContext causal;
  const at::Tensor whole = trained->HiddenStates(MakeRaggedBatch({kTokens}), causal).detach();
  CachedSequences sequences(*model, 2, 32);
  std::vector<at::Tensor> rows;
  const Tokens other = {4, 7, 1};
  for (size_t i = 0; i < kTokens.size(); ++i) {
    std::vector<CachedSequences::Input> inputs = {{0, absl::MakeSpan(&kTokens[i], 1)}};
    if (i == 3) inputs.push_back({1, other});
    const auto hidden = sequences.Decode(inputs);
    ASSERT_TRUE(hidden.ok()) << hidden.status();
    rows.push_back(hidden->narrow(0, 0, 1));
  }
  EXPECT_TRUE(at::equal(at::cat(rows), whole));
}

// The base model packed: a rollout server that stores it so computes the trainer's bits, with
// adapters and without, and gradients are those of a dense model of its values.
TEST_P(LoraModelTest, AdaptersTrainBesidePackedWeights) {
  for (const kernels::WeightFormat format :
       {kernels::WeightFormat::kBfloat16, kernels::WeightFormat::kInt8,
        kernels::WeightFormat::kInt4}) {
    LoadOptions stored = Adapted();
    stored.placement.weight_format = format;
    const auto served = TinyModel(GetParam(), {}, stored);
    stored.requires_grad = true;
    const auto trained = TinyModel(GetParam(), {}, stored);
    const auto dense = TinyModel(GetParam(), {}, Adapted(/*requires_grad=*/true));
    CopyComputedValues(*trained, *dense);
    for (const Model* model : {served.get(), trained.get(), dense.get()}) FillAdapters(*model);

    CachedSequences sequences(*served, 2, 32);
    const std::vector<CachedSequences::Input> inputs = {
        {0, kTokens, static_cast<int64_t>(kTokens.size())}};
    const auto decoded = sequences.Decode(inputs);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    CausalContext causal;
    const at::Tensor hidden = trained->HiddenStates(MakeRaggedBatch({kTokens}), causal);
    EXPECT_TRUE(at::equal(*decoded, hidden.detach()));
    {
      const ops::WithoutAdapters without;
      LoadOptions alone;
      alone.placement.weight_format = format;
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(Logits(*trained), Logits(*TinyModel(GetParam(), {}, alone))));
    }

    int64_t packed = 0, compared = 0;
    for (const Model* each : {trained.get(), dense.get()}) {
      Logits(*each).log_softmax(1).square().mean().backward();
    }
    for (const Parameter& parameter : trained->DeclaredParameters()) {
      EXPECT_EQ(trained->IsPacked(parameter), parameter.packed != nullptr);
      packed += parameter.packed != nullptr ? 1 : 0;
      if (!parameter.trainable || !parameter.value.grad().defined()) continue;
      const at::Tensor expected = dense->Parameter(parameter.spec.name).grad();
      // The sums are float32, in different orders.
      EXPECT_TRUE(at::allclose(parameter.value.grad(), expected, 1e-4,
                               2e-6 * expected.abs().max().item<double>() + 1e-9))
          << parameter.spec.name;
      ++compared;
    }
    EXPECT_GT(packed, 8);
    EXPECT_GT(compared, 8);
  }
}

TEST_P(LoraModelTest, AnUpdateBringsTheAdaptersAlone) {
  const auto model = TinyModel(GetParam(), {}, Adapted());
  const auto updated = TinyModel(GetParam(), {}, Adapted());
  FillAdapters(*updated);
  const auto prepared = model->PrepareWeights();
  for (const Parameter& parameter : updated->DeclaredParameters()) {
    EXPECT_EQ(model->IsSent(parameter.spec), parameter.spec.adapts);
    if (parameter.spec.adapts) {
      ASSERT_TRUE(prepared->Add(parameter.spec.name, parameter.value).ok());
    }
  }
  ASSERT_TRUE(prepared->CheckComplete().ok());
  model->Adopt(*prepared);
  model->OnWeightsChanged();
  EXPECT_TRUE(at::equal(Logits(*model), Logits(*updated)));
}

INSTANTIATE_TEST_SUITE_P(Families, LoraModelTest, testing::ValuesIn(EveryFamily()),
                         [](const auto& info) { return info.param; });

std::vector<ParameterSpec> TinySpecs(const std::string& family = "llama") {
  return ModelParameters(TinyConfig(family), {}).value();
}

TEST(LoraTest, TargetsAreChosenByTheLastPartOfTheirNames) {
  const auto specs =
      WithAdapters(TinySpecs(), {.rank = 2, .alpha = 4, .target_modules = {"v_proj", "up_proj"}});
  ASSERT_TRUE(specs.ok());
  std::vector<std::string> names;
  for (const ParameterSpec& spec : *specs) {
    if (spec.adapts && spec.block == 1) names.push_back(spec.name);
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("model.layers.0.self_attn.v_proj.lora_A.weight",
                                                   "model.layers.0.self_attn.v_proj.lora_B.weight",
                                                   "model.layers.0.mlp.up_proj.lora_A.weight",
                                                   "model.layers.0.mlp.up_proj.lora_B.weight"));
}

TEST(LoraTest, BadOptionsNameTheField) {
  const auto field = [](const LoraOptions& options, const std::string& family = "llama") {
    const absl::Status status = WithAdapters(TinySpecs(family), options).status();
    return std::string(FieldPath(status).value_or("")) + " " +
           std::string(absl::StatusCodeToString(status.code()));
  };
  EXPECT_EQ(field({.rank = -1, .alpha = 1, .target_modules = {"q_proj"}}),
            "lora.rank INVALID_ARGUMENT");
  EXPECT_EQ(field({.rank = 1, .alpha = 0, .target_modules = {"q_proj"}}),
            "lora.alpha INVALID_ARGUMENT");
  EXPECT_EQ(field({.rank = 1, .alpha = 1}), "lora.target_modules INVALID_ARGUMENT");
  EXPECT_EQ(field({.rank = 1, .alpha = 1, .target_modules = {"q_proj", "x_proj"}}),
            "lora.target_modules[1] INVALID_ARGUMENT");
  EXPECT_EQ(field({.rank = 1, .alpha = 1, .target_modules = {"kv_b_proj"}}, "deepseek_v3"),
            "lora.target_modules[0] UNIMPLEMENTED");
  EXPECT_EQ(field({.rank = 1, .alpha = 1, .target_modules = {"gate"}}, "qwen3_moe"),
            "lora.target_modules[0] UNIMPLEMENTED");
  EXPECT_EQ(
      FieldPath(Model::Random(TinyConfig(), 1,
                              {.requires_grad = true, .freeze = {"*norm*"}, .lora = Adapted().lora})
                    .status()),
      "freeze");
}

TEST(LoraTest, OnlyAdaptersAndAValueHeadTrain) {
  LoadOptions options = Adapted(/*requires_grad=*/true);
  options.head = HeadKind::kValue;
  const auto critic = TinyModel("llama", {}, options);
  for (const Parameter& parameter : critic->DeclaredParameters()) {
    EXPECT_EQ(parameter.trainable, parameter.spec.adapts || parameter.spec.name == kValueHeadWeight)
        << parameter.spec.name;
  }
}

TEST(LoraTest, FilesOfPeftAreReadAsTheyWereWritten) {
  const TemporaryFolder folder;
  WriteTinyModel(folder / "base", 3);
  const auto model = *Model::Load(folder / "base", Adapted());
  FillAdapters(*model);
  std::filesystem::create_directory(folder / "adapter");
  ASSERT_TRUE(model->SaveAdapters(folder / "adapter", SourceOf(model->Parameters())).ok());

  const auto read = Model::Load(folder / "base", {.lora = {.path = folder / "adapter"}});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ((*read)->lora().rank, 3);
  EXPECT_EQ((*read)->lora().alpha, 5);
  EXPECT_TRUE(at::equal(Logits(**read), Logits(*model)));
  // Its sums are those of a model whose adapters came in another way.
  EXPECT_EQ((*read)->kept_sums().Digest(), model->kept_sums().Digest());

  const auto other =
      Model::Load(folder / "base", {.lora = {.rank = 4, .path = folder / "adapter"}});
  EXPECT_EQ(FieldPath(other.status()), "lora.rank");

  ASSERT_TRUE(model->Save(folder / "merged").ok());
  const auto merged = *Model::Load(folder / "merged");
  EXPECT_TRUE(at::allclose(Logits(*merged), Logits(*model), 1e-4, 2e-5));
}

}  // namespace
}  // namespace tandem
