// Weight files of every family: what is missing, damaged or too much is named, critics continue
// from every layout of a value head, and what was saved is saved again with the same bytes.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/model/family.h"
#include "common/model/model.h"
#include "common/model/passes/attention_context.h"
#include "common/model/testing/models.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/testing/read_named_tensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

const LoadOptions kCritic = {.head = HeadKind::kValue, .value_head_seed = 3};

// All maps that may have a bias have one.
const json kBiases = {{"attention_bias", true}, {"mlp_bias", true}};

class FamilyFilesTest : public testing::TestWithParam<std::string> {
 protected:
  FamilyFilesTest() {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::ranges::replace(name, '/', '_');
    directory_ = fs::path(testing::TempDir()) / "family_files" / name;
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    WriteConfig(json::object());
  }

  void WriteConfig(json changes) {
    changes.update(kBiases);
    std::ofstream(directory_ / "config.json") << TinyConfigJson(GetParam(), changes).dump();
  }
  void WriteWeights(const NamedTensors& tensors, const std::string& name = "model.safetensors") {
    ASSERT_TRUE(WriteNamedTensors(directory_ / name, tensors).ok());
  }
  NamedTensors Parameters() const { return TinyModel(GetParam(), kBiases)->Parameters(); }
  // The tensors of the family's files.
  NamedTensors Tensors() const {
    EXPECT_TRUE(TinyModel(GetParam(), kBiases)->Save(directory_ / "written").ok());
    return ReadNamedTensors(directory_ / "written" / "model.safetensors").value();
  }

  // Expects that the files are refused with INVALID_ARGUMENT and the tensor's name.
  void ExpectNamed(const std::string& tensor, const std::string& what) {
    const absl::Status status = Model::Load(directory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << tensor << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("'" + tensor + "'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }

  std::string Bytes(const fs::path& file) const {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  fs::path directory_;
};

TEST_P(FamilyFilesTest, EveryTensorThatIsMissingIsNamed) {
  const NamedTensors all = Tensors();
  for (const auto& missing : all) {
    NamedTensors tensors = all;
    std::erase_if(tensors, [&](const auto& one) { return one.first == missing.first; });
    WriteWeights(tensors);
    ExpectNamed(missing.first, "missing");
  }
}

TEST_P(FamilyFilesTest, EveryTensorOfAnotherShapeOrTypeIsNamed) {
  NamedTensors tensors = Tensors();
  for (auto& [name, tensor] : tensors) {
    const at::Tensor right = tensor;
    // A size that config.json has too is refused by its key, beside the tensor's name.
    tensor = at::cat({right, right.narrow(0, 0, 1)});
    WriteWeights(tensors);
    ExpectNamed(name, "");
    tensor = right.unsqueeze(0);
    WriteWeights(tensors);
    ExpectNamed(name, "");
    tensor = right.to(at::kLong);
    WriteWeights(tensors);
    ExpectNamed(name, "not floating-point");
    tensor = right;
  }
}

TEST_P(FamilyFilesTest, ATensorTooManyIsNamed) {
  const NamedTensors all = Tensors();
  for (const auto& [name, tensor] : all) {
    NamedTensors tensors = all;
    const std::string another = absl::StrCat(name, "_2");
    tensors.emplace_back(another, tensor);
    WriteWeights(tensors);
    ExpectNamed(another, "unexpected");
  }
}

TEST_P(FamilyFilesTest, CutFilesAreDataLoss) {
  WriteWeights(Tensors());
  const fs::path file = directory_ / "model.safetensors";
  fs::resize_file(file, fs::file_size(file) - 3);
  EXPECT_EQ(Model::Load(directory_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_P(FamilyFilesTest, WhatWasSavedIsSavedAgainWithTheSameBytes) {
  for (const HeadKind head : {HeadKind::kLm, HeadKind::kValue}) {
    const fs::path first = directory_ / "first", second = directory_ / "second";
    const LoadOptions options = {.head = head};
    ASSERT_TRUE(TinyModel(GetParam(), kBiases, options)->Save(first).ok());
    const auto loaded = Model::Load(first, options);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ASSERT_TRUE((*loaded)->Save(second).ok());
    for (const char* name : {"model.safetensors", "config.json"}) {
      EXPECT_EQ(Bytes(first / name), Bytes(second / name)) << name;
    }
  }
}

// The layouts of a value head, each beside a backbone, with and without a bias, and in a file of
// its own.
TEST_P(FamilyFilesTest, ACriticContinuesFromEveryLayoutOfAValueHead) {
  const at::Tensor weight = at::randn({1, 30}), bias = at::randn({1});
  const NamedTensors parameters = Parameters();
  NamedTensors backbone = Tensors();
  std::erase_if(backbone, [](const auto& one) { return one.first == kLmHeadName; });
  for (const std::string stem :
       {"score.", "v_head.summary.", "output_layer.", "output_layer.value_head."}) {
    for (const bool has_bias : {false, true}) {
      for (const bool own_file : {false, true}) {
        SCOPED_TRACE(absl::StrCat(stem, has_bias ? " bias" : "", own_file ? " own file" : ""));
        NamedTensors head = {{stem + "weight", weight}};
        if (has_bias) head.emplace_back(stem + "bias", bias);
        NamedTensors beside = backbone;
        if (!own_file) beside.insert(beside.end(), head.begin(), head.end());
        WriteWeights(beside);
        fs::remove(directory_ / "value_head.safetensors");
        if (own_file) WriteWeights(head, "value_head.safetensors");
        const auto critic = Model::Load(directory_, kCritic);
        ASSERT_TRUE(critic.ok()) << critic.status();
        EXPECT_EQ((*critic)->value_head_source(), ValueHeadSource::kCheckpoint);
        EXPECT_TRUE(at::equal((*critic)->Parameter(kValueHeadWeight), weight));
        EXPECT_EQ((*critic)->Parameter(kValueHeadBias).defined(), has_bias);
        for (const auto& [name, tensor] : parameters) {
          if (name == kLmHeadName) continue;
          EXPECT_TRUE(at::equal((*critic)->Parameter(name), tensor)) << name;
        }
        // An export has the head under one name, and goes on as it was.
        const fs::path saved = directory_ / "saved";
        ASSERT_TRUE((*critic)->Save(saved).ok());
        EXPECT_EQ(Model::Load(saved, kCritic).value()->weights_digest(),
                  (*critic)->weights_digest());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyFilesTest, testing::ValuesIn(EveryFamily()),
                         [](const auto& info) { return info.param; });

std::vector<std::string> FamiliesWithExperts() {
  std::vector<std::string> names;
  for (const std::string& name : EveryFamily()) {
    if (TinyConfig(name).decoder.experts.routing.num_experts > 0) names.push_back(name);
  }
  return names;
}

// Files in which the experts of a layer are one tensor.
class StackedExpertsTest : public FamilyFilesTest {
 protected:
  // Puts stacks into the place of the parameters that they hold.
  NamedTensors Stacked() const {
    NamedTensors tensors = Parameters();
    for (const StackedTensor& stack : Stacks()) {
      std::vector<at::Tensor> parts;
      for (const StackedParameter& parameter : stack.parameters) {
        const auto found =
            std::ranges::find(tensors, parameter.name, [](const auto& one) { return one.first; });
        parts.push_back(found->second);
        tensors.erase(found);
      }
      tensors.emplace_back(stack.name, at::cat(parts).view(stack.shape));
    }
    return tensors;
  }
  std::vector<StackedTensor> Stacks() const {
    const Family* const family = FindFamily(GetParam()).value();
    return family->StackedTensors(TinyConfig(GetParam(), kBiases));
  }
};

TEST_P(StackedExpertsTest, AreThoseOfFilesThatHoldThemOneByOne) {
  WriteWeights(Stacked());
  const auto loaded = Model::Load(directory_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->weights_digest(), TinyModel(GetParam(), kBiases)->weights_digest());
}

TEST_P(StackedExpertsTest, AStackThatIsMissingDamagedOrTooMuchIsNamed) {
  const NamedTensors all = Stacked();
  for (const StackedTensor& stack : Stacks()) {
    const auto changed = [&](const auto& change) {
      NamedTensors tensors = all;
      change(*std::ranges::find(tensors, stack.name, [](const auto& one) { return one.first; }));
      WriteWeights(tensors);
    };
    // A missing stack is named by its first parameter: files may hold that one.
    changed([](auto& one) { one.first = "model.norm.weight_2"; });
    const absl::Status missing = Model::Load(directory_).status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument) << missing;
    EXPECT_TRUE(absl::StrContains(std::string(missing.message()), "'model.norm.weight_2'") ||
                absl::StrContains(std::string(missing.message()),
                                  absl::StrCat("'", stack.parameters[0].name, "': missing")))
        << missing;
    changed([](auto& one) { one.second = at::cat({one.second, one.second.narrow(0, 0, 1)}); });
    ExpectNamed(stack.name, "");
    changed([](auto& one) { one.second = one.second.to(at::kLong); });
    ExpectNamed(stack.name, "not floating-point");
    NamedTensors twice = all;
    const at::Tensor again =
        TinyModel(GetParam(), kBiases)->Parameter(stack.parameters.back().name);
    twice.emplace_back(stack.parameters.back().name, again);
    WriteWeights(twice);
    ExpectNamed(stack.parameters.back().name, "given twice");
  }
}

INSTANTIATE_TEST_SUITE_P(Families, StackedExpertsTest, testing::ValuesIn(FamiliesWithExperts()),
                         [](const auto& info) { return info.param; });

// The numbers of experts and their widths that the files do not have, by the file's own keys.
TEST(ExpertSizesTest, AreRefusedByTheKeysOfTheFile) {
  const fs::path directory = fs::path(testing::TempDir()) / "expert_sizes";
  const auto refused = [&](const std::string& family, const json& written, const json& changes) {
    fs::remove_all(directory);
    EXPECT_TRUE(TinyModel(family, written)->Save(directory).ok());
    json config = written;
    config.update(changes);
    std::ofstream(directory / "config.json") << TinyConfigJson(family, config).dump();
    const absl::Status status = Model::Load(directory).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  const json none = json::object(), new_key = {{"num_experts", nullptr}, {"num_local_experts", 5}};
  const json old_key = {{"n_routed_experts", nullptr}, {"num_local_experts", 6}};
  EXPECT_EQ(refused("mixtral", none, {{"num_local_experts", 4}}), "config.json.num_local_experts");
  EXPECT_EQ(refused("qwen3_moe", none, {{"num_experts", 4}}), "config.json.num_experts");
  EXPECT_EQ(refused("qwen3_moe", new_key, {{"num_local_experts", 4}}),
            "config.json.num_local_experts");
  EXPECT_EQ(refused("deepseek_v3", old_key, {{"num_local_experts", 9}}),
            "config.json.num_local_experts");
  EXPECT_EQ(refused("deepseek_v3", none, {{"n_routed_experts", 9}}),
            "config.json.n_routed_experts");
  EXPECT_EQ(refused("deepseek_v3", none, {{"n_shared_experts", 2}}),
            "config.json.n_shared_experts");
  EXPECT_EQ(refused("deepseek_v3", none, {{"moe_intermediate_size", 13}}),
            "config.json.moe_intermediate_size");
  EXPECT_EQ(refused("qwen2_moe", none, {{"shared_expert_intermediate_size", 22}}),
            "config.json.shared_expert_intermediate_size");
}

// DeepSeek-V3's biases choose experts: half a number more is another expert.
TEST(DeepseekFilesTest, TheRoutersBiasStaysFloat32InExportsOfOtherTypes) {
  const fs::path directory = fs::path(testing::TempDir()) / "router_bias";
  const std::string bias = "model.layers.1.mlp.gate.e_score_correction_bias";
  const auto model = TinyModel("deepseek_v3");
  model->Parameter(bias).copy_(at::arange(6) / 7 + 1e-4);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    fs::remove_all(directory);
    ASSERT_TRUE(model->Save(directory, dtype).ok());
    const NamedTensors written = ReadNamedTensors(directory / "model.safetensors").value();
    for (const auto& [name, tensor] : written) {
      EXPECT_EQ(tensor.scalar_type(), name == bias ? at::kFloat : ToScalarType(dtype)) << name;
    }
    const auto loaded = Model::Load(directory).value();
    EXPECT_TRUE(at::equal(loaded->Parameter(bias), model->Parameter(bias)));
  }
}

// The experts that tokens take in the model of `directory`.
at::Tensor ChosenExperts(const fs::path& directory, const LoadOptions& options) {
  const auto model = Model::Load(directory, options).value();
  const c10::InferenceMode guard(!options.requires_grad);
  RaggedBatch batch = MakeRaggedBatch({{1, 2, 3, 4, 5, 6, 7}}, model->device());
  std::vector<at::Tensor> chosen(1);
  batch.routing.chosen = &chosen;
  CausalContext causal;
  model->HiddenStates(batch, causal);
  return chosen[0];
}

// Routers of DeepSeek-V3 have float32 biases, and multiply in float32, in a model of any type.
TEST(DeepseekFilesTest, InBfloat16TokensTakeTheExpertsOfFloat32) {
  const fs::path directory = fs::path(testing::TempDir()) / "router_types";
  fs::remove_all(directory);
  const std::string gate = "model.layers.1.mlp.gate.";
  const auto model = TinyModel("deepseek_v3");
  // All of these biases are 100 in bfloat16; scores differ by less than they do.
  const at::Tensor bias = at::tensor({0.30, 0.05, 0.0, 0.20, 0.10, 0.15}).to(at::kFloat) + 100;
  model->Parameter(gate + "e_score_correction_bias").copy_(bias);
  model->Parameter(gate + "weight").mul_(1e-3);
  ASSERT_TRUE(model->Save(directory).ok());
  const at::Tensor expected = ChosenExperts(directory, {});
  EXPECT_TRUE(at::equal(expected[0], at::tensor({0, 5}, at::kLong))) << expected;
  for (const bool trains : {false, true}) {
    const LoadOptions options = {.requires_grad = trains, .placement = {.dtype = at::kBFloat16}};
    EXPECT_TRUE(at::equal(ChosenExperts(directory, options), expected)) << trains;
    EXPECT_TRUE(at::equal(
        Model::Load(directory, options).value()->Parameter(gate + "e_score_correction_bias"),
        bias));
  }
}

// A critic has no use for the layers of multi-token prediction either, and keeps them too.
TEST(DeepseekFilesTest, ACriticKeepsTheLayersOfMultiTokenPrediction) {
  const fs::path directory = fs::path(testing::TempDir()) / "prediction_layers";
  fs::remove_all(directory);
  ASSERT_TRUE(TinyModel("deepseek_v3")->Save(directory).ok());
  NamedTensors tensors = ReadNamedTensors(directory / "model.safetensors").value();
  const std::string kept = "model.layers.2.eh_proj.weight";
  tensors.emplace_back(kept, at::randn({30, 60}));
  ASSERT_TRUE(WriteNamedTensors(directory / "model.safetensors", tensors).ok());
  const auto critic = Model::Load(directory, kCritic);
  ASSERT_TRUE(critic.ok()) << critic.status();
  EXPECT_FALSE((*critic)->Parameter(kept).defined());
  ASSERT_TRUE((*critic)->Save(directory / "saved").ok());
  const NamedTensors saved = ReadNamedTensors(directory / "saved" / "model.safetensors").value();
  const auto found = std::ranges::find(saved, kept, [](const auto& one) { return one.first; });
  ASSERT_NE(found, saved.end());
  EXPECT_TRUE(at::equal(found->second, tensors.back().second));
  EXPECT_TRUE(Model::Load(directory / "saved", kCritic).ok());
}

}  // namespace
}  // namespace tandem
