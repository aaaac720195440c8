// Model::Load and Model::Save: round trips, and what is refused.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/model/loading/weight_files_check.h"
#include "common/model/model.h"
#include "common/model/testing/models.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/testing/read_named_tensors.h"
#include "common/weights/weights_digest.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

class ModelLoadTest : public testing::Test {
 protected:
  ModelLoadTest() {
    directory_ = fs::path(testing::TempDir()) / "model_load" /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  // Writes the config and the weights of a random model, changed by `edit`.
  template <typename Edit>
  void Write(const json& config_changes, const Edit& edit) {
    const auto model = TinyModel("llama", config_changes);
    NamedTensors tensors = model->Parameters();
    edit(tensors);
    WriteWeights(tensors);
    std::ofstream(directory_ / "config.json") << TinyConfigJson("llama", config_changes).dump();
  }
  void Write(const json& config_changes = json::object()) {
    Write(config_changes, [](NamedTensors&) {});
  }
  void WriteWeights(const NamedTensors& tensors, const std::string& name = "model.safetensors") {
    ASSERT_TRUE(WriteNamedTensors(directory_ / name, tensors).ok());
  }

  void ExpectInvalid(const std::string& tensor, const std::string& what,
                     const LoadOptions& options = {}) {
    const absl::Status status = Model::Load(directory_, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(directory_.string()), HasSubstr("tensor '" + tensor + "'"),
                      HasSubstr(what)));
  }

  static void ExpectSameParameters(const Model& a, const Model& b) {
    const NamedTensors left = a.Parameters(), right = b.Parameters();
    ASSERT_EQ(left.size(), right.size());
    for (size_t i = 0; i < left.size(); ++i) {
      EXPECT_EQ(left[i].first, right[i].first);
      EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
    }
  }

  fs::path directory_;
};

constexpr char kNorm[] = "model.norm.weight";

TEST_F(ModelLoadTest, SavedModelsComeBackBitForBit) {
  for (const bool tied : {false, true}) {
    const auto model = TinyModel("qwen3", {{"tie_word_embeddings", tied}, {"my_key", 7}});
    ASSERT_TRUE(model->Save(directory_).ok());
    const auto loaded = Model::Load(directory_, {.requires_grad = true});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ((*loaded)->tied(), tied);
    ExpectSameParameters(*model, **loaded);
    const json config = json::parse((*loaded)->config().raw_json);
    EXPECT_EQ(config["my_key"], 7);
    EXPECT_EQ(config["architectures"], json::array({"Qwen3ForCausalLM"}));
  }
}

TEST_F(ModelLoadTest, HalfPrecisionFilesAreReadIntoFp32) {
  const auto model = TinyModel();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    ASSERT_TRUE(model->Save(directory_, dtype).ok());
    const auto loaded = Model::Load(directory_);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const at::Tensor expected =
        model->Parameter(kLmHeadName).to(ToScalarType(dtype)).to(at::kFloat);
    EXPECT_TRUE(at::equal((*loaded)->Parameter(kLmHeadName), expected));
  }
}

TEST_F(ModelLoadTest, TheDigestIsThatOfTheFilesValuesWhateverIsStored) {
  const auto model = TinyModel();
  ASSERT_TRUE(model->Save(directory_, DType::kBFloat16).ok());
  const auto exact = Model::Load(directory_).value();
  const auto half = Model::Load(directory_, {.placement = {.dtype = at::kBFloat16}}).value();
  const auto training =
      Model::Load(directory_, {.requires_grad = true, .placement = {.dtype = at::kBFloat16}})
          .value();
  EXPECT_EQ(exact->weights_digest(), WeightsDigest(exact->Parameters()));
  EXPECT_EQ(half->weights_digest(), exact->weights_digest());
  EXPECT_EQ(training->weights_digest(), exact->weights_digest());
  EXPECT_NE(model->weights_digest(), exact->weights_digest());
}

TEST_F(ModelLoadTest, AShardHoldsItsSliceOfEveryParameter) {
  const json even = {{"vocab_size", 62}, {"intermediate_size", 44}, {"attention_bias", true}};
  Write(even);
  const auto whole = Model::Load(directory_).value();
  for (const int64_t index : {0, 1}) {
    const auto shard =
        Model::Load(directory_,
                    {.requires_grad = index == 1,
                     .placement = {.dtype = at::kFloat, .shard_index = index, .shard_count = 2}})
            .value();
    const auto expect_slice = [&](const std::string& name, int64_t axis) {
      const at::Tensor full = whole->Parameter(name).detach();
      EXPECT_TRUE(at::equal(shard->Parameter(name).detach(), full.chunk(2, axis)[index])) << name;
    };
    const std::string layer = "model.layers.1.";
    expect_slice(kEmbeddingName, 0);
    expect_slice(kLmHeadName, 0);
    expect_slice(layer + "self_attn.k_proj.weight", 0);
    expect_slice(layer + "self_attn.k_proj.bias", 0);
    expect_slice(layer + "self_attn.o_proj.weight", 1);
    expect_slice(layer + "mlp.up_proj.weight", 0);
    expect_slice(layer + "mlp.down_proj.weight", 1);
    EXPECT_TRUE(at::equal(shard->Parameter(kNorm), whole->Parameter(kNorm)));
    EXPECT_TRUE(at::equal(shard->Parameter(layer + "self_attn.o_proj.bias"),
                          whole->Parameter(layer + "self_attn.o_proj.bias")));
    EXPECT_EQ(shard->num_parameters(), whole->num_parameters());
    // Whole tensors are cut as files are.
    ASSERT_TRUE(shard->LoadParameters(TinyModel("llama", even, {}, 9)->Parameters()).ok());
    // Without the group that has the other shard.
    CausalContext context;
    EXPECT_THROW(shard->HiddenStates(MakeRaggedBatch({{1}}), context), c10::NotImplementedError);
    EXPECT_EQ(shard->Save(directory_ / "shard").code(), absl::StatusCode::kUnimplemented);
  }
}

// The stages of a pipeline.
TEST_F(ModelLoadTest, AProcessMayHoldSomeBlocks) {
  for (const bool tied : {false, true}) {
    Write({{"tie_word_embeddings", tied}});
    const auto whole = Model::Load(directory_).value();
    const auto first =
        Model::Load(directory_,
                    {.placement = {.holds_block = [](int64_t block) { return block < 2; }}})
            .value();
    const auto last =
        Model::Load(directory_, {.placement = {.holds_block =
                                                   [tied](int64_t block) {
                                                     return block >= 2 || (tied && block == 0);
                                                   }}})
            .value();
    for (const Model* half : {first.get(), last.get()}) {
      EXPECT_EQ(half->weights_digest(), whole->weights_digest());
      EXPECT_EQ(half->num_parameters(), whole->num_parameters());
      ASSERT_EQ(half->DeclaredParameters().size(), whole->DeclaredParameters().size());
      for (const Parameter& parameter : half->DeclaredParameters()) {
        const int64_t block = parameter.spec.block;
        const bool held = half == first.get() ? block < 2 : block >= 2 || (tied && block == 0);
        EXPECT_EQ(parameter.value.defined(), held) << parameter.spec.name;
        EXPECT_EQ(half->BlockBuffers()[static_cast<size_t>(block)].numel() > 0, held);
        if (held) {
          EXPECT_TRUE(at::equal(parameter.value, whole->Parameter(parameter.spec.name)));
        }
      }
      EXPECT_EQ(half->Save(directory_ / "half").code(), absl::StatusCode::kUnimplemented);
    }
    const RaggedBatch batch = MakeRaggedBatch({{1, 2, 3}, {4}});
    CausalContext context;
    const at::Tensor expected = whole->HiddenStates(batch, context);
    at::Tensor hidden;
    for (int64_t block = 0; block < whole->num_blocks(); ++block) {
      const Model& half = block < 2 ? *first : *last;
      hidden = half.RunBlock(block, hidden, half.StartPass(batch, context));
    }
    EXPECT_TRUE(at::equal(hidden, expected));
    EXPECT_TRUE(at::equal(last->ForwardLogits(hidden), whole->ForwardLogits(expected)));
    // Whole tensors, of which each takes its own; what is missing is missed by all.
    NamedTensors other = TinyModel("llama", {{"tie_word_embeddings", tied}}, {}, 9)->Parameters();
    ASSERT_TRUE(first->LoadParameters(other).ok());
    EXPECT_TRUE(at::equal(first->Parameter(kEmbeddingName), other.front().second));
    other.erase(other.begin());
    EXPECT_FALSE(first->LoadParameters(other).ok());
    EXPECT_FALSE(last->LoadParameters(other).ok());
  }
}

TEST_F(ModelLoadTest, AShardThatDoesNotDivideIsRefused) {
  Write();  // a vocabulary of 61
  EXPECT_EQ(FieldPath(Model::Load(directory_, {.placement = {.shard_count = 2}}).status()),
            "placement.shard_count");
  EXPECT_EQ(FieldPath(Model::Load(directory_, {.placement = {.shard_index = 1}}).status()),
            "placement.shard_index");
}

TEST_F(ModelLoadTest, TokenizerFilesTravelWithTheModel) {
  Write();
  std::ofstream(directory_ / "tokenizer.json") << "{}";
  const fs::path copy = directory_ / "copy";
  ASSERT_TRUE(Model::Load(directory_).value()->Save(copy).ok());
  EXPECT_TRUE(fs::exists(copy / "tokenizer.json"));
}

TEST_F(ModelLoadTest, MissingTensorsAreNamed) {
  Write({}, [](NamedTensors& tensors) {
    std::erase_if(tensors, [](const auto& entry) { return entry.first == kNorm; });
  });
  ExpectInvalid(kNorm, "missing");
}

TEST_F(ModelLoadTest, UnexpectedTensorsAreNamed) {
  Write({}, [](NamedTensors& tensors) {
    tensors.emplace_back("model.layers.2.input_layernorm.weight", at::ones({30}));
  });
  ExpectInvalid("model.layers.2.input_layernorm.weight", "unexpected");
}

TEST_F(ModelLoadTest, MisshapedAndIntegerTensorsAreNamed) {
  Write({}, [](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (name == kNorm) tensor = at::ones({31});
    }
  });
  ExpectInvalid(kNorm, "shape [31], expected [30]");
  Write({}, [](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (name == kNorm) tensor = at::ones({30}, at::kLong);
    }
  });
  ExpectInvalid(kNorm, "not floating-point");
}

// Each of these would take memory, or time, for a model that nobody has.
TEST_F(ModelLoadTest, SizesThatTheFilesDoNotHaveAreRefusedByName) {
  Write();
  const std::pair<const char*, int64_t> absurd[] = {{"num_hidden_layers", 2'000'000'000},
                                                    {"num_hidden_layers", 3},
                                                    {"hidden_size", 2'000'000'000},
                                                    {"vocab_size", 2'000'000'000},
                                                    {"intermediate_size", 2'000'000'000},
                                                    {"head_dim", 2'000'000'000},
                                                    {"num_key_value_heads", 3}};
  for (const auto& [field, value] : absurd) {
    std::ofstream(directory_ / "config.json") << TinyConfigJson("llama", {{field, value}}).dump();
    const absl::Status status = Model::Load(directory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::string named = std::string(field) == "head_dim" ? "num_attention_heads" : field;
    EXPECT_EQ(FieldPath(status), "config.json." + named) << status;
    const ModelConfig config = LoadModelConfig(directory_).value();
    EXPECT_EQ(CheckSizes(config, directory_.string()), status);
  }
}

TEST_F(ModelLoadTest, AVisionTowersTensorsHaveTwoNames) {
  const auto write = [&](const std::function<void(NamedTensors&)>& change) {
    const auto model = TinyModel("qwen2_vl");
    ASSERT_TRUE(model->Save(directory_).ok());
    NamedTensors tensors = model->Parameters();
    change(tensors);
    WriteWeights(tensors);
  };
  const std::string proj = "visual.patch_embed.proj.weight";
  write([&](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (name == proj) name.insert(0, "model.");
      if (name == kNorm) name = "model.language_model.norm.weight";
    }
  });
  const auto loaded = Model::Load(directory_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSameParameters(*TinyModel("qwen2_vl"), **loaded);
  write([&](NamedTensors& tensors) {
    tensors.emplace_back("model." + proj, at::zeros({16, 3, 2, 3, 3}));
  });
  ExpectInvalid(proj, "given twice");
  write([&](NamedTensors& tensors) {
    std::erase_if(tensors, [&](const auto& entry) { return entry.first == proj; });
  });
  ExpectInvalid(proj, "missing");
}

TEST_F(ModelLoadTest, ALayersNumberInTheFilesIsNotBelieved) {
  Write({}, [](NamedTensors& tensors) {
    tensors.emplace_back("model.layers.1999999999.input_layernorm.weight", at::ones({30}));
  });
  std::ofstream(directory_ / "config.json")
      << TinyConfigJson("llama", {{"num_hidden_layers", 2'000'000'000}}).dump();
  EXPECT_EQ(FieldPath(Model::Load(directory_).status()), "config.json.num_hidden_layers");
}

// Files with experts.
class ExpertFilesTest : public ModelLoadTest {
 protected:
  // Writes weights that `edit` has changed, and their config.
  template <typename Edit>
  void WriteExperts(const json& config, const Edit& edit) {
    NamedTensors tensors = TinyModel("qwen3_moe")->Parameters();
    edit(tensors);
    WriteWeights(tensors);
    std::ofstream(directory_ / "config.json") << TinyConfigJson("qwen3_moe", config).dump();
  }
  static void Remove(NamedTensors& tensors, const std::string& part) {
    std::erase_if(tensors,
                  [&](const auto& one) { return one.first.find(part) != std::string::npos; });
  }
};

TEST_F(ExpertFilesTest, SizesThatTheFilesDoNotHaveAreRefusedByName) {
  WriteExperts(json::object(), [](NamedTensors&) {});
  const std::pair<const char*, int64_t> absurd[] = {{"num_experts", 2'000'000'000},
                                                    {"num_experts", 4},
                                                    {"moe_intermediate_size", 2'000'000'000},
                                                    {"intermediate_size", 44}};
  for (const auto& [field, value] : absurd) {
    std::ofstream(directory_ / "config.json")
        << TinyConfigJson("qwen3_moe", {{field, value}}).dump();
    const absl::Status status = Model::Load(directory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(FieldPath(status), std::string("config.json.") + field) << status;
  }
}

TEST_F(ExpertFilesTest, AnExpertThatIsMissingOrTooManyIsNamed) {
  const std::string fourth = "model.layers.0.mlp.experts.3.up_proj.weight";
  WriteExperts(json::object(), [&](NamedTensors& tensors) { Remove(tensors, fourth); });
  ExpectInvalid(fourth, "missing");
  const std::string sixth = "model.layers.0.mlp.experts.5.up_proj.weight";
  WriteExperts(json::object(), [&](NamedTensors& tensors) {
    tensors.emplace_back(sixth, at::ones({12, 30}));
  });
  ExpectInvalid(sixth, "unexpected");
}

TEST_F(ExpertFilesTest, StackedExpertsAreThoseOfFilesThatHoldThemOneByOne) {
  const auto model = TinyModel("qwen3_moe");
  const std::string experts = "model.layers.0.mlp.experts.";
  const auto stack = [&](NamedTensors& tensors) {
    std::vector<at::Tensor> gate_up, down;
    for (const std::string expert : {"0", "1", "2", "3", "4"}) {
      const std::string name = experts + expert;
      gate_up.push_back(at::cat({model->Parameter(name + ".gate_proj.weight"),
                                 model->Parameter(name + ".up_proj.weight")}));
      down.push_back(model->Parameter(name + ".down_proj.weight"));
    }
    Remove(tensors, experts);
    tensors.emplace_back(experts + "gate_up_proj", at::stack(gate_up));
    tensors.emplace_back(experts + "down_proj", at::stack(down));
  };
  WriteExperts(json::object(), stack);
  const auto loaded = Model::Load(directory_).value();
  ExpectSameParameters(*loaded, *model);
  EXPECT_EQ(loaded->weights_digest(), model->weights_digest());
  EXPECT_EQ(WeightsDigest(loaded->ReadSource().value().tensors), model->weights_digest());

  WriteExperts(json::object(), [&](NamedTensors& tensors) {
    stack(tensors);
    tensors.back().second = at::ones({4, 30, 12});
  });
  ExpectInvalid(experts + "down_proj", "shape");
  const std::string twice = experts + "2.up_proj.weight";
  WriteExperts(json::object(), [&](NamedTensors& tensors) {
    stack(tensors);
    tensors.emplace_back(twice, at::ones({12, 30}));
  });
  ExpectInvalid(twice, "given twice");
  WriteExperts({{"moe_intermediate_size", 13}}, stack);
  EXPECT_EQ(FieldPath(Model::Load(directory_).status()), "config.json.moe_intermediate_size");
}

// Files of Phi-3 hold queries, keys and values in one tensor, and gate and up in one.
class FusedFilesTest : public ModelLoadTest {
 protected:
  void SetUp() override {
    ASSERT_TRUE(model_->Save(directory_).ok());
    tensors_ = ReadNamedTensors(directory_ / "model.safetensors").value();
  }
  at::Tensor& Tensor(const std::string& name) {
    for (auto& [other, tensor] : tensors_) {
      if (other == name) return tensor;
    }
    return tensors_.emplace_back(name, at::Tensor()).second;
  }
  void Remove(const std::string& name) {
    std::erase_if(tensors_, [&](const auto& one) { return one.first == name; });
  }

  const std::unique_ptr<Model> model_ = TinyModel("phi3");
  const std::string layer_ = "model.layers.1.";
  NamedTensors tensors_;
};

TEST_F(FusedFilesTest, AnExportHasTheTensorsOfTransformers) {
  const auto parameter = [&](const std::string& name) { return model_->Parameter(layer_ + name); };
  const std::string attention = "self_attn.", mlp = "mlp.";
  EXPECT_TRUE(at::equal(
      Tensor(layer_ + attention + "qkv_proj.weight"),
      at::cat({parameter(attention + "q_proj.weight"), parameter(attention + "k_proj.weight"),
               parameter(attention + "v_proj.weight")})));
  EXPECT_TRUE(
      at::equal(Tensor(layer_ + mlp + "gate_up_proj.weight"),
                at::cat({parameter(mlp + "gate_proj.weight"), parameter(mlp + "up_proj.weight")})));
  for (const auto& [name, tensor] : tensors_) {
    EXPECT_THAT(name, testing::Not(testing::ContainsRegex("\\.[qkv]_proj|gate_proj|\\.up_proj")))
        << name;
  }
  const auto loaded = Model::Load(directory_).value();
  ExpectSameParameters(*loaded, *model_);
  EXPECT_EQ(loaded->weights_digest(), model_->weights_digest());
  EXPECT_EQ(WeightsDigest(loaded->ReadSource().value().tensors), model_->weights_digest());
}

TEST_F(FusedFilesTest, WhatIsMissingMisshapenOrTooManyIsNamed) {
  const std::string qkv = layer_ + "self_attn.qkv_proj.weight";
  const at::Tensor whole = Tensor(qkv);
  Remove(qkv);
  WriteWeights(tensors_);
  ExpectInvalid(qkv, "missing");
  Tensor(qkv) = whole.narrow(0, 0, 90);
  WriteWeights(tensors_);
  ExpectInvalid(qkv, "shape");
  Tensor(qkv) = whole;
  const std::string up = layer_ + "mlp.up_proj.weight";
  Tensor(up) = at::ones({43, 30});
  WriteWeights(tensors_);
  ExpectInvalid(up, "given twice");
}

TEST_F(FusedFilesTest, SizesThatTheFilesDoNotHaveAreRefusedByName) {
  const std::pair<const char*, int64_t> absurd[] = {{"num_attention_heads", 2'000'000},
                                                    {"intermediate_size", 2'000'000'000}};
  for (const auto& [field, value] : absurd) {
    std::ofstream(directory_ / "config.json") << TinyConfigJson("phi3", {{field, value}}).dump();
    const absl::Status status = Model::Load(directory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(FieldPath(status), std::string("config.json.") + field) << status;
  }
}

TEST_F(ModelLoadTest, WhatWasLoadedCanBeReadAgain) {
  Write();
  const auto model = Model::Load(directory_, {.requires_grad = true}).value();
  const NamedTensors before = TinyModel()->Parameters();
  ASSERT_TRUE(model->LoadParameters(TinyModel("llama", {}, {}, 9)->Parameters()).ok());
  const SourceParameters source = model->ReadSource().value();
  EXPECT_EQ(WeightsDigest(source.tensors), model->weights_digest());
  EXPECT_EQ(source.Mark(), model->source_mark());
  ASSERT_TRUE(model->LoadParameters(source.tensors).ok());
  for (const auto& [name, tensor] : before) {
    EXPECT_TRUE(at::equal(model->Parameter(name).detach(), tensor)) << name;
  }
  fs::remove(directory_ / "model.safetensors");
  EXPECT_EQ(model->ReadSource().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelLoadTest, TruncatedWeightsAreDataLoss) {
  Write();
  const fs::path weights = directory_ / "model.safetensors";
  fs::resize_file(weights, fs::file_size(weights) - 5);
  EXPECT_EQ(Model::Load(directory_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(ModelLoadTest, EmptyDirectoryIsNotFound) {
  EXPECT_EQ(Model::Load(directory_).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(directory_ / "config.json") << TinyConfigJson().dump();
  EXPECT_EQ(Model::Load(directory_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelLoadTest, OldRotaryBuffersAreIgnored) {
  Write({}, [](NamedTensors& tensors) {
    tensors.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq", at::ones({5}));
  });
  EXPECT_TRUE(Model::Load(directory_).ok());
}

TEST_F(ModelLoadTest, TiedHeadInTheFileMustEqualTheEmbedding) {
  const json tied = {{"tie_word_embeddings", true}};
  Write(tied, [](NamedTensors& tensors) {
    tensors.emplace_back("lm_head.weight", tensors[0].second.clone());
  });
  EXPECT_TRUE(Model::Load(directory_).ok());
  Write(tied, [](NamedTensors& tensors) {
    tensors.emplace_back("lm_head.weight", tensors[0].second + 1);
  });
  ExpectInvalid("lm_head.weight", "differs");
  // Untied on request, the head in the file is the head.
  const auto untied = Model::Load(directory_, {.untie_embeddings = true});
  ASSERT_TRUE(untied.ok()) << untied.status();
  EXPECT_FALSE((*untied)->tied());
  EXPECT_FALSE(at::equal((*untied)->Parameter(kLmHeadName),
                         (*untied)->Parameter("model.embed_tokens.weight")));
}

TEST_F(ModelLoadTest, UntiedCopyOfATiedModelStartsWithItsHead) {
  Write({{"tie_word_embeddings", true}});
  const auto model = Model::Load(directory_, {.untie_embeddings = true});
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(at::equal((*model)->Parameter(kLmHeadName),
                        (*model)->Parameter("model.embed_tokens.weight")));
  EXPECT_FALSE((*model)
                   ->Parameter(kLmHeadName)
                   .is_alias_of((*model)->Parameter("model.embed_tokens.weight")));
}

TEST_F(ModelLoadTest, NamesWithoutTheModelsPrefixAreThoseOfItsBody) {
  const auto rename = [](NamedTensors& tensors) {
    std::erase_if(tensors, [](const auto& one) { return one.first == kLmHeadName; });
    for (auto& [name, tensor] : tensors) name = name.substr(std::string("model.").size());
  };
  Write({{"tie_word_embeddings", true}}, rename);
  const auto loaded = Model::Load(directory_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSameParameters(**loaded, *TinyModel("llama", {{"tie_word_embeddings", true}}));
  // Without a head of its own it is no language model, as `transformers` would have to make one up.
  Write({}, rename);
  ExpectInvalid(kLmHeadName, "missing");
}

TEST_F(ModelLoadTest, APrefixOfAllNamesIsNamedWithTheNameThatWasExpected) {
  for (const std::string prefix : {"_orig_mod.", "base_model.model.", "module.", "policy."}) {
    Write({}, [&](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) name.insert(0, prefix);
    });
    ExpectInvalid(prefix + "model.embed_tokens.weight",
                  "expected 'model.embed_tokens.weight': names that begin with '" + prefix + "'");
    Write({}, [&](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) {
        if (name.starts_with("model.")) name.erase(0, 6);
        name.insert(0, prefix);
      }
    });
    ExpectInvalid(prefix + "embed_tokens.weight", "expected 'model.embed_tokens.weight'");
  }
  Write({}, [](NamedTensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].first = absl::StrCat("transformer.h.", i);
    }
  });
  ExpectInvalid("transformer.h.0", "names that begin with 'model.layers.'");
}

// --- Value heads ---

const LoadOptions kCritic = {.head = HeadKind::kValue, .value_head_seed = 3};

TEST_F(ModelLoadTest, BaseModelGetsASeededRandomValueHead) {
  Write();
  const auto a = Model::Load(directory_, kCritic), b = Model::Load(directory_, kCritic);
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ((*a)->value_head_source(), ValueHeadSource::kRandom);
  ExpectSameParameters(**a, **b);
  EXPECT_FALSE((*a)->Parameter("lm_head.weight").defined());
  LoadOptions other = kCritic;
  other.value_head_seed = 4;
  EXPECT_FALSE(at::equal((*a)->Parameter("score.weight"),
                         Model::Load(directory_, other).value()->Parameter("score.weight")));
}

TEST_F(ModelLoadTest, ARandomValueHeadIsReadAgainAsItWasDrawn) {
  Write();
  const auto critic = Model::Load(directory_, kCritic).value();
  const SourceParameters source = critic->ReadSource().value();
  EXPECT_EQ(WeightsDigest(source.tensors), critic->weights_digest());
  EXPECT_EQ(source.tensors.back().first, "score.weight");
}

TEST_F(ModelLoadTest, TiedBaseModelNeedsUntyingForAValueHead) {
  Write({{"tie_word_embeddings", true}});
  const absl::Status status = Model::Load(directory_, kCritic).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), "untie_embeddings");
  LoadOptions untied = kCritic;
  untied.untie_embeddings = true;
  EXPECT_TRUE(Model::Load(directory_, untied).ok());
}

TEST_F(ModelLoadTest, AValueHeadOfSeveralLayersIsNamedAsSuch) {
  for (const std::string name : {"score.0.weight", "score.2.bias", "v_head.0.weight"}) {
    Write({}, [&](NamedTensors& tensors) { tensors.emplace_back(name, at::ones({4})); });
    const absl::Status status = Model::Load(directory_, kCritic).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("tensor '" + name + "'"), HasSubstr("several layers")));
  }
}

TEST_F(ModelLoadTest, SavedCriticsComeBackWhateverTheirTieFlag) {
  Write();
  const auto critic = Model::Load(directory_, kCritic).value();
  const fs::path saved = directory_ / "critic";
  ASSERT_TRUE(critic->Save(saved).ok());
  json config = json::parse(std::ifstream(saved / "config.json"));
  EXPECT_EQ(config["architectures"], json::array({"LlamaForTokenClassification"}));
  EXPECT_EQ(config["num_labels"], 1);
  config["tie_word_embeddings"] = true;
  std::ofstream(saved / "config.json") << config.dump();
  const auto loaded = Model::Load(saved, kCritic);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->value_head_source(), ValueHeadSource::kCheckpoint);
  ExpectSameParameters(*critic, **loaded);
}

// Layers for multi-token prediction lie behind the model's own.
TEST_F(ModelLoadTest, ExportsKeepTheTensorsOfLayersThatAreNotUsed) {
  const auto write = [&](const json& changes) {
    EXPECT_TRUE(TinyModel("deepseek_v3", changes)->Save(directory_).ok());
    NamedTensors tensors = ReadNamedTensors(directory_ / "model.safetensors").value();
    tensors.emplace_back("model.layers.2.eh_proj.weight", at::randn({30, 60}).to(at::kBFloat16));
    tensors.emplace_back("model.layers.2.shared_head.norm.weight", at::randn({30}));
    WriteWeights(tensors);
    return tensors;
  };
  const NamedTensors written = write({});
  const auto model = Model::Load(directory_, {});
  ASSERT_TRUE(model.ok()) << model.status();
  const fs::path saved = directory_ / "saved";
  ASSERT_TRUE((*model)->Save(saved).ok());
  const NamedTensors again = ReadNamedTensors(saved / "model.safetensors").value();
  ASSERT_EQ(again.size(), written.size());
  for (const auto& [name, tensor] : written) {
    const auto same = std::find_if(again.begin(), again.end(), [&, &name = name](const auto& one) {
      return one.first == name;
    });
    ASSERT_NE(same, again.end()) << name;
    EXPECT_EQ(same->second.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(same->second, tensor)) << name;
  }
  fs::remove(directory_ / "model.safetensors");
  EXPECT_TRUE(TinyModel("deepseek_v3")->Save(directory_).ok());
  const absl::Status gone = (*model)->Save(saved);
  EXPECT_EQ(gone.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(gone.message()), testing::HasSubstr("model.layers.2.eh_proj.weight"));
  // Without such layers the tensors are those of nothing.
  write({{"num_nextn_predict_layers", 0}});
  EXPECT_EQ(Model::Load(directory_, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

// transformers has no Olmo2ForTokenClassification; a sequence classifier has no bias. Gemma 3's
// classifier of texts begins with another prefix than its language model.
TEST_F(ModelLoadTest, CriticsAreSavedAsAClassThatTransformersHas) {
  const auto saved_class = [&](bool bias, const char* family = "olmo2") {
    EXPECT_TRUE(TinyModel(family)->Save(directory_).ok());
    if (bias) {
      WriteWeights({{"score.weight", at::ones({1, 30})}, {"score.bias", at::ones({1})}},
                   "value_head.safetensors");
    }
    const auto critic = Model::Load(directory_, kCritic);
    EXPECT_TRUE(critic.ok()) << critic.status();
    const fs::path saved = directory_ / "critic";
    EXPECT_TRUE((*critic)->Save(saved).ok());
    return json::parse(std::ifstream(saved / "config.json"))["architectures"];
  };
  EXPECT_EQ(saved_class(false), json::array({"Olmo2ForSequenceClassification"}));
  EXPECT_EQ(saved_class(true), json::array({"Olmo2ForTokenClassification"}));
  fs::remove_all(directory_);
  EXPECT_EQ(saved_class(false, "gemma3_text"),
            json::array({"Gemma3TextForSequenceClassification"}));
}

TEST_F(ModelLoadTest, EveryKnownNameOfAValueHeadIsRead) {
  const at::Tensor weight = at::randn({1, 30}), bias = at::randn({1});
  for (const std::string stem :
       {"score.", "v_head.summary.", "output_layer.", "output_layer.value_head."}) {
    for (const bool with_bias : {false, true}) {
      Write({}, [&](NamedTensors& tensors) {
        tensors.emplace_back(stem + "weight", weight);
        if (with_bias) tensors.emplace_back(stem + "bias", bias);
      });
      const auto model = Model::Load(directory_, kCritic);
      ASSERT_TRUE(model.ok()) << model.status();
      EXPECT_TRUE(at::equal((*model)->Parameter("score.weight"), weight));
      EXPECT_EQ((*model)->Parameter("score.bias").defined(), with_bias);
    }
  }
}

TEST_F(ModelLoadTest, ValueHeadInAFileOfItsOwnIsRead) {
  Write();
  const at::Tensor weight = at::randn({1, 30});
  WriteWeights({{"v_head.summary.weight", weight}}, "value_head.safetensors");
  const auto model = Model::Load(directory_, kCritic);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(at::equal((*model)->Parameter("score.weight"), weight));
}

TEST_F(ModelLoadTest, BadValueHeadsAreNamed) {
  Write({}, [](NamedTensors& t) { t.emplace_back("score.weight", at::ones({2, 30})); });
  ExpectInvalid("score.weight", "shape [2, 30], expected [1, 30]", kCritic);
  Write({}, [](NamedTensors& t) { t.emplace_back("score.bias", at::ones({1})); });
  ExpectInvalid("score.bias", "without its weight", kCritic);
  Write({}, [](NamedTensors& t) {
    t.emplace_back("score.weight", at::ones({1, 30}));
    t.emplace_back("v_head.summary.weight", at::ones({1, 30}));
  });
  ExpectInvalid("v_head.summary.weight", "a second value head", kCritic);
  ExpectInvalid("score.weight", "unexpected");  // as a language model
}

}  // namespace
}  // namespace tandem
