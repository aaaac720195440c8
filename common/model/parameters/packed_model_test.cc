// Models whose matrices are packed (Placement::weight_format) beside dense ones.
#include "common/model/testing/packed_model.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>
#include <vector>

#include "common/base/errors/error.h"
#include "common/model/model.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/model/testing/cached_sequences.h"
#include "common/model/testing/models.h"
#include "common/ops/ops.h"

namespace tandem {
namespace {

using kernels::WeightFormat;
using Tokens = std::vector<int64_t>;

// Three of the 61 rows are padding.
constexpr int64_t kTokenIds = 58;

LoadOptions Options(WeightFormat format) {
  return {.num_token_ids = kTokenIds, .placement = {.weight_format = format}};
}

// Maps with all biases that a family has.
nlohmann::json Biased(bool tied) {
  return {{"attention_bias", true}, {"mlp_bias", true}, {"tie_word_embeddings", tied}};
}

std::unique_ptr<Model> MakeModel(const std::string& family, bool tied, WeightFormat format) {
  auto model = TinyModel(family, Biased(tied), Options(format));
  EXPECT_TRUE(model->LoadParameters(RandomParameters(*model, 7)).ok());
  return model;
}

// Decodes a prompt of 40 tokens and one of 3, in two steps.
at::Tensor Logits(const Model& model) {
  const c10::InferenceMode guard;
  CachedSequences sequences(model, 2, 64);
  Tokens prompt;
  for (int64_t i = 0; i < 40; ++i) prompt.push_back((i * i * 13 + i) % kTokenIds);
  const at::Tensor first =
      sequences.Decode({{0, prompt, 40}, {1, Tokens{4, kTokenIds - 1, 0}}}).value();
  const at::Tensor second = sequences.Decode({{1, Tokens{9}}, {0, Tokens{2}}}).value();
  return model.ForwardLogits(at::cat({first, second}));
}

TEST(PackedModelTest, HasTheBitsOfADenseModelWithItsValues) {
  for (const std::string& family : EveryFamily()) {
    for (const bool tied : {false, true}) {
      for (const WeightFormat format : kPackedFormats) {
        const auto packed = MakeModel(family, tied, format);
        const auto dense = MakeModel(family, tied, WeightFormat::kDense);
        const at::Tensor exact = Logits(*dense);
        CopyComputedValues(*packed, *dense);
        const at::Tensor logits = Logits(*packed);
        EXPECT_EQ(logits.sizes(), (at::IntArrayRef{43, kTokenIds}));
        EXPECT_TRUE(at::equal(logits, Logits(*dense))) << family << tied;
        EXPECT_EQ(at::equal(logits, exact), format == WeightFormat::kFloat32) << family << tied;
      }
    }
  }
}

// Passes with matrices rounded to bfloat16 (Placement::weight_dtype) beside packed ones.

LoadOptions Rounded(bool trains) {
  return {.num_token_ids = kTokenIds,
          .requires_grad = trains,
          .placement = {.weight_dtype = at::kBFloat16}};
}

// The two prompts of Logits() with the tokens after them, in one pass of training: the logits of
// the tokens that Logits() asks for.
at::Tensor TrainingLogits(const Model& model) {
  Tokens first, second = {4, kTokenIds - 1, 0, 9};
  for (int64_t i = 0; i < 40; ++i) first.push_back((i * i * 13 + i) % kTokenIds);
  first.push_back(2);
  CausalContext context;
  const at::Tensor hidden = model.HiddenStates(MakeRaggedBatch({first, second}), context);
  std::vector<int64_t> rows(40);
  std::iota(rows.begin(), rows.end(), 0);
  rows.insert(rows.end(), {43, 44, 40});
  return model.ForwardLogits(hidden.index_select(0, at::tensor(rows, at::kLong)));
}

TEST(RoundedModelTest, TrainingHasTheBitsOfWeightsPackedInBfloat16) {
  for (const std::string& family : EveryFamily()) {
    for (const bool tied : {false, true}) {
      const auto packed = MakeModel(family, tied, WeightFormat::kBfloat16);
      const auto trained = TinyModel(family, Biased(tied), Rounded(/*trains=*/true));
      const auto frozen = TinyModel(family, Biased(tied), Rounded(/*trains=*/false));
      const NamedTensors start = RandomParameters(*packed, 7);
      ASSERT_TRUE(trained->LoadParameters(start).ok());
      ASSERT_TRUE(frozen->LoadParameters(start).ok());
      const at::Tensor logits = TrainingLogits(*trained);
      EXPECT_TRUE(logits.requires_grad());
      EXPECT_TRUE(at::equal(logits, Logits(*packed))) << family << tied;
      EXPECT_TRUE(at::equal(Logits(*trained), Logits(*packed))) << family << tied;
      EXPECT_TRUE(at::equal(Logits(*frozen), Logits(*packed))) << family << tied;
      EXPECT_FALSE(
          at::equal(Logits(*MakeModel(family, tied, WeightFormat::kDense)), Logits(*packed)));
      for (const auto& [name, value] : start) {
        EXPECT_TRUE(at::equal(trained->Parameter(name), value)) << "masters keep their bits";
      }

      // After an update that most bfloat16 weights are too coarse for.
      NamedTensors updated;
      for (const auto& [name, value] : trained->Parameters()) {
        const at::NoGradGuard no_grad;
        value.mul_(1.001);
        updated.emplace_back(name, value.clone());
      }
      trained->OnWeightsChanged();
      ASSERT_TRUE(packed->LoadParameters(updated).ok());
      EXPECT_TRUE(at::equal(TrainingLogits(*trained), Logits(*packed))) << family << tied;
      EXPECT_FALSE(at::equal(Logits(*packed), logits));
    }
  }
}

// Several blocks of the KV cache, which were consumed in chunks.
TEST(RoundedModelTest, LongSequencesHaveTheBitsOfWeightsPackedInBfloat16) {
  const auto packed = MakeModel("qwen3", false, WeightFormat::kBfloat16);
  const auto trained = TinyModel("qwen3", Biased(false), Rounded(/*trains=*/true));
  ASSERT_TRUE(trained->LoadParameters(RandomParameters(*packed, 7)).ok());
  Tokens tokens;
  for (int64_t i = 0; i < 200; ++i) tokens.push_back((i * i * 7 + i) % kTokenIds);
  CausalContext context;
  const at::Tensor training =
      trained->ForwardLogits(trained->HiddenStates(MakeRaggedBatch({tokens}), context));
  const c10::InferenceMode guard;
  CachedSequences sequences(*packed, 1, 256);
  const absl::Span<const int64_t> span(tokens);
  const at::Tensor first = sequences.Decode({{0, span.subspan(0, 130), 130}}).value();
  const at::Tensor rest = sequences.Decode({{0, span.subspan(130), 70}}).value();
  EXPECT_TRUE(at::equal(training, packed->ForwardLogits(at::cat({first, rest}))));
}

TEST(RoundedModelTest, GradientsAreThoseOfAModelWithTheRoundedValues) {
  for (const bool tied : {false, true}) {
    const auto rounded = TinyModel("qwen2", Biased(tied), Rounded(/*trains=*/true));
    const auto exact =
        TinyModel("qwen2", Biased(tied), {.num_token_ids = kTokenIds, .requires_grad = true});
    ASSERT_TRUE(rounded->LoadParameters(RandomParameters(*rounded, 7)).ok());
    CopyComputedValues(*rounded, *exact);
    for (const Model* model : {rounded.get(), exact.get()}) {
      TrainingLogits(*model).pow(2).mean().backward();
    }
    for (const auto& [name, parameter] : rounded->Parameters()) {
      EXPECT_TRUE(at::equal(parameter.grad(), exact->Parameter(name).grad())) << name << tied;
    }
  }
}

TEST(RoundedModelTest, ACriticsHeadIsRoundedToo) {
  LoadOptions options = Rounded(/*trains=*/true);
  options.head = HeadKind::kValue;
  const auto critic = TinyModel("llama", {}, options);
  const at::Tensor hidden = at::randn({5, critic->config().hidden_size});
  const at::Tensor head = critic->Parameter(kValueHeadWeight).detach();
  EXPECT_TRUE(at::equal(critic->Values(hidden),
                        ops::Linear(hidden, head.to(at::kBFloat16).to(at::kFloat), {}).squeeze(1)));
}

TEST(RoundedModelTest, WhatCannotBeRoundedIsRefused) {
  const auto path = [](const LoadOptions& options) {
    const absl::Status status = Model::Random(TinyConfig(), 1, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  const char* const field = "placement.weight_dtype";
  LoadOptions options = Rounded(/*trains=*/true);
  options.placement.dtype = at::kBFloat16;
  EXPECT_EQ(path(options), field);
  options = Rounded(/*trains=*/true);
  options.placement.weight_dtype = at::kHalf;
  EXPECT_EQ(path(options), field);
  options = Rounded(/*trains=*/false);
  options.placement.weight_format = WeightFormat::kBfloat16;
  EXPECT_EQ(path(options), field);
  options = Rounded(/*trains=*/false);
  options.without_memory = true;
  EXPECT_EQ(path(options), field);
  EXPECT_THROW(TinyModel("llama", {}, Rounded(/*trains=*/false))->PrepareWeights(), c10::Error);
}

// Passes in which linear maps round their inputs (Placement::activation_dtype): the same model of a
// rollout server, a trainer, and a frozen one of the trainer.
TEST(RoundedInputsTest, TrainingHasTheBitsOfInference) {
  for (const std::string& family : EveryFamily()) {
    for (const bool tied : {false, true}) {
      LoadOptions packed_options = Options(WeightFormat::kBfloat16),
                  trained_options = Rounded(true), frozen_options = Rounded(false);
      const auto wide = MakeModel(family, tied, WeightFormat::kBfloat16);
      for (LoadOptions* options : {&packed_options, &trained_options, &frozen_options}) {
        options->placement.activation_dtype = at::kBFloat16;
      }
      const auto packed = TinyModel(family, Biased(tied), packed_options),
                 trained = TinyModel(family, Biased(tied), trained_options),
                 frozen = TinyModel(family, Biased(tied), frozen_options);
      const NamedTensors start = RandomParameters(*packed, 7);
      for (Model* model : {packed.get(), trained.get(), frozen.get()}) {
        ASSERT_TRUE(model->LoadParameters(start).ok());
      }
      const at::Tensor training = TrainingLogits(*trained), logits = Logits(*packed);
      EXPECT_EQ(logits.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(training, logits)) << family << tied;
      EXPECT_TRUE(at::equal(Logits(*trained), logits)) << family << tied;
      EXPECT_TRUE(at::equal(Logits(*frozen), logits)) << family << tied;
      // Rounding changes the logits, by about its 2^-9.
      const at::Tensor exact = Logits(*wide);
      EXPECT_FALSE(at::equal(logits, exact)) << family << tied;
      EXPECT_LE(((logits - exact).norm() / exact.norm()).item<double>(), 0.1) << family << tied;
    }
  }
}

// The gradient is that of float64 but for the rounding of factors, as in other computations in
// bfloat16.
TEST(RoundedInputsTest, GradientsAreCloseToThoseOfExactInputs) {
  for (const std::string& family : EveryFamily()) {
    LoadOptions options = Rounded(/*trains=*/true);
    options.placement.activation_dtype = at::kBFloat16;
    const auto rounding = TinyModel(family, Biased(false), options),
               exact = TinyModel(family, Biased(false), Rounded(/*trains=*/true));
    const NamedTensors start = RandomParameters(*exact, 7);
    for (Model* model : {rounding.get(), exact.get()}) {
      ASSERT_TRUE(model->LoadParameters(start).ok());
      TrainingLogits(*model).pow(2).mean().backward();
    }
    double error = 0, size = 0;
    for (const auto& [name, parameter] : rounding->Parameters()) {
      const at::Tensor expected = exact->Parameter(name).grad();
      ASSERT_EQ(parameter.grad().defined(), expected.defined()) << name;
      if (!expected.defined()) continue;
      ASSERT_EQ(parameter.grad().scalar_type(), at::kFloat) << name;
      error += (parameter.grad() - expected).pow(2).sum().item<double>();
      size += expected.pow(2).sum().item<double>();
    }
    EXPECT_LE(std::sqrt(error / size), 0.1) << family;
    EXPECT_GT(error, 0) << family;
  }
}

TEST(RoundedInputsTest, WhatCannotRoundItsInputsIsRefused) {
  const auto path = [](LoadOptions options) {
    options.placement.activation_dtype = at::kBFloat16;
    const absl::Status status = Model::Random(TinyConfig(), 1, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  const char* const field = "placement.activation_dtype";
  EXPECT_EQ(path({}), field);
  EXPECT_EQ(path(Options(WeightFormat::kFloat32)), field);
  EXPECT_EQ(path(Options(WeightFormat::kInt8)), field);
  LoadOptions options = Rounded(/*trains=*/true);
  options.without_memory = true;
  EXPECT_EQ(path(options), field);
  ops::SetKernelPath(ops::KernelPath::kAten);
  EXPECT_EQ(path(Rounded(/*trains=*/true)), field);
  ops::SetKernelPath(ops::KernelPath::kAuto);
}

TEST(PackedModelTest, QuantisedLogitsStayClose) {
  const at::Tensor exact = Logits(*MakeModel("llama", false, WeightFormat::kDense));
  const auto error = [&](WeightFormat format) {
    return ((Logits(*MakeModel("llama", false, format)) - exact).norm() / exact.norm())
        .item<double>();
  };
  // In parts of the norm of the logits: the numbers have 8, 7 and 3 bits beside their sign.
  EXPECT_LE(error(WeightFormat::kBfloat16), 0.01);
  EXPECT_LE(error(WeightFormat::kInt8), 0.02);
  EXPECT_LE(error(WeightFormat::kInt4), 0.3);
}

class PackedModelFilesTest : public testing::Test {
 protected:
  PackedModelFilesTest()
      : directory_(std::filesystem::path(testing::TempDir()) / "packed_model" /
                   testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }

  const std::filesystem::path directory_;
};

TEST_F(PackedModelFilesTest, Bfloat16FilesHaveTheSameLogitsInBfloat16AndFloat32) {
  ASSERT_TRUE(TinyModel("qwen2", Biased(true), {.num_token_ids = 61})
                  ->Save(directory_, DType::kBFloat16)
                  .ok());
  const auto dense = Model::Load(directory_, Options(WeightFormat::kDense)).value();
  for (const WeightFormat format : {WeightFormat::kFloat32, WeightFormat::kBfloat16}) {
    const auto packed = Model::Load(directory_, Options(format)).value();
    EXPECT_TRUE(at::equal(Logits(*packed), Logits(*dense)));
    EXPECT_EQ(packed->weights_digest(), dense->weights_digest());
    EXPECT_EQ(packed->num_parameters(), dense->num_parameters());
  }
}

TEST_F(PackedModelFilesTest, AreNotWritten) {
  const auto model = TinyModel("llama", {}, Options(WeightFormat::kInt8));
  EXPECT_EQ(model->Save(directory_).code(), absl::StatusCode::kUnimplemented);
  EXPECT_THROW(model->Parameters(), c10::Error);
  EXPECT_THROW(model->head_rows().dense(), c10::Error);
}

TEST(PackedModelTest, AnUpdateReplacesEveryValue) {
  for (const bool tied : {false, true}) {
    for (const WeightFormat format : kPackedFormats) {
      const auto updated = TinyModel("qwen3", Biased(tied), Options(format), /*seed=*/3);
      const at::Tensor before = Logits(*updated);
      // In another floating-point type than the stored one.
      NamedTensors tensors = RandomParameters(*updated, 7);
      for (auto& [name, tensor] : tensors) tensor = tensor.to(at::kDouble);
      ASSERT_TRUE(updated->LoadParameters(tensors).ok());
      const at::Tensor after = Logits(*updated);
      EXPECT_FALSE(at::equal(after, before));
      EXPECT_TRUE(at::equal(after, Logits(*MakeModel("qwen3", tied, format))));
    }
  }
}

// Dense models and every packed format. A swap only exchanges memory: the weights that served are
// in the prepared ones afterwards, and come back by a second swap.
TEST(PackedModelTest, PreparedWeightsAreSwappedIn) {
  for (const bool tied : {false, true}) {
    for (const WeightFormat format : {WeightFormat::kDense, WeightFormat::kFloat32,
                                      WeightFormat::kBfloat16, WeightFormat::kInt8}) {
      const auto model = MakeModel("qwen2", tied, format);
      const at::Tensor before = Logits(*model);
      const auto updated = TinyModel("qwen2", Biased(tied), Options(format), /*seed=*/3);
      const NamedTensors tensors = RandomParameters(*model, 8);
      ASSERT_TRUE(updated->LoadParameters(tensors).ok());
      const at::Tensor expected = Logits(*updated);

      const auto prepared = model->PrepareWeights();
      for (const auto& [name, tensor] : tensors) {
        EXPECT_FALSE(prepared->CheckComplete().ok());
        ASSERT_TRUE(prepared->Add(name, tensor).ok()) << name;
      }
      ASSERT_TRUE(prepared->CheckComplete().ok());
      EXPECT_TRUE(at::equal(Logits(*model), before)) << "still in force";
      const at::Tensor norm = model->Parameter("model.norm.weight");
      const void* const address = norm.const_data_ptr();
      model->Adopt(*prepared);
      EXPECT_NE(norm.const_data_ptr(), address) << "a tensor follows its memory";
      EXPECT_TRUE(at::equal(Logits(*model), expected));
      model->Adopt(*prepared);
      EXPECT_EQ(norm.const_data_ptr(), address);
      EXPECT_TRUE(at::equal(Logits(*model), before));
    }
  }
}

// A sender rounds with an operation of ATen, and packing with a function of its own.
TEST(PackedModelTest, WhatASenderRoundedHasTheBitsOfWhatIsRoundedHere) {
  const LoadOptions dense = {.num_token_ids = kTokenIds, .placement = {.dtype = at::kBFloat16}};
  for (const std::string& family : EveryFamily()) {
    for (const LoadOptions& options : {Options(WeightFormat::kBfloat16), dense}) {
      const auto whole = TinyModel(family, Biased(/*tied=*/false), options);
      const auto sent = TinyModel(family, Biased(/*tied=*/false), options, /*seed=*/3);
      NamedTensors tensors = RandomParameters(*whole, 7);
      // Ties, the largest finite value, and values without a leading 1.
      tensors[0].second.view(-1).narrow(0, 0, 6).copy_(
          at::tensor({1.00390625f, 1.01171875f, -3.3895e38f, 1e-40f, -2e-39f, -0.0f}));
      ASSERT_TRUE(whole->LoadParameters(tensors).ok());
      const auto prepared = sent->PrepareWeights();
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto& [name, tensor] = tensors[i];
        const Parameter& parameter = sent->DeclaredParameters()[i];
        const bool rounds =
            parameter.packed != nullptr || parameter.value.scalar_type() == at::kBFloat16;
        ASSERT_TRUE(prepared->Add(name, rounds ? tensor.to(at::kBFloat16) : tensor).ok()) << name;
      }
      sent->Adopt(*prepared);
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(at::equal(sent->DeclaredParameters()[i].ComputedValue(),
                              whole->DeclaredParameters()[i].ComputedValue()))
            << family << " " << tensors[i].first;
      }
    }
  }
}

TEST(PackedModelTest, PreparedWeightsAreChecked) {
  const auto model = MakeModel("llama", true, WeightFormat::kInt8);
  const at::Tensor before = Logits(*model);
  const NamedTensors tensors = RandomParameters(*model, 8);
  const auto refuses = [](const absl::Status& status) {
    return status.code() == absl::StatusCode::kInvalidArgument;
  };
  {
    const auto prepared = model->PrepareWeights();
    ASSERT_TRUE(prepared->Add(tensors[1].first, tensors[1].second).ok());
    EXPECT_TRUE(refuses(prepared->Add(tensors[1].first, tensors[1].second))) << "twice";
    EXPECT_TRUE(refuses(prepared->Add("other", tensors[1].second)));
    EXPECT_TRUE(refuses(prepared->Add(tensors[2].first, tensors[2].second.narrow(0, 0, 1))));
    EXPECT_TRUE(refuses(prepared->Add(tensors[2].first, tensors[2].second.to(at::kInt))));
    EXPECT_TRUE(refuses(prepared->CheckComplete()));
  }
  for (const bool same : {true, false}) {
    const auto prepared = model->PrepareWeights();
    // The head may come before the embedding.
    const at::Tensor embedding = tensors.front().second;
    ASSERT_EQ(tensors.front().first, kEmbeddingName);
    ASSERT_TRUE(prepared->Add(kLmHeadName, same ? embedding.clone() : embedding + 1).ok());
    for (const auto& [name, tensor] : tensors) ASSERT_TRUE(prepared->Add(name, tensor).ok());
    EXPECT_EQ(prepared->CheckComplete().ok(), same);
  }
  EXPECT_TRUE(at::equal(Logits(*model), before));
}

TEST(PackedModelTest, TakesOnlyCompleteUpdatesAndATiedHeadThatEqualsItsEmbedding) {
  const auto model = MakeModel("llama", true, WeightFormat::kInt4);
  const at::Tensor before = Logits(*model);
  NamedTensors tensors = RandomParameters(*model, 8);
  tensors.emplace_back(kLmHeadName, tensors.front().second + 1);
  EXPECT_EQ(model->LoadParameters(tensors).code(), absl::StatusCode::kInvalidArgument);
  tensors.pop_back();
  tensors.pop_back();
  EXPECT_EQ(model->LoadParameters(tensors).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(at::equal(Logits(*model), before));
}

TEST(PackedModelTest, WhatCannotBePackedIsRefused) {
  const auto path = [](const LoadOptions& options) {
    const absl::Status status = Model::Random(TinyConfig(), 1, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  const char* const field = "placement.weight_format";
  LoadOptions options = Options(WeightFormat::kInt8);
  options.requires_grad = true;
  EXPECT_EQ(path(options), field);
  options.lora = {.rank = 2, .alpha = 4, .target_modules = {kAllLinear}};
  EXPECT_TRUE(Model::Random(TinyConfig(), 1, options).ok());
  options.without_memory = true;
  EXPECT_EQ(path(options), field);
  options = Options(WeightFormat::kInt8);
  options.placement.dtype = at::kBFloat16;
  EXPECT_EQ(path(options), field);
  options = Options(WeightFormat::kInt8);
  options.without_memory = true;
  EXPECT_EQ(path(options), field);
  ops::SetKernelPath(ops::KernelPath::kAten);
  EXPECT_EQ(path(Options(WeightFormat::kFloat32)), field);
  ops::SetKernelPath(ops::KernelPath::kAuto);
}

}  // namespace
}  // namespace tandem
