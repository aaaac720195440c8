// LoadSpeculator and SaveSpeculator: layouts, round trips, and what is refused.
#include "common/speculator/speculator_files.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "common/base/errors/error.h"
#include "common/base/files/atomic_file.h"
#include "common/speculator/speculator_memory.h"
#include "common/speculator/speculator_update.h"
#include "common/speculator/testing/cases.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::speculator {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

using Tensors = std::map<std::string, at::Tensor>;

class SpeculatorFilesTest : public testing::TestWithParam<Case> {
 protected:
  SpeculatorFilesTest() {
    directory_ = fs::path(testing::TempDir()) / "speculator_files" /
                 fs::path(testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  absl::StatusOr<std::unique_ptr<Speculator>> Load() const {
    return LoadSpeculator(directory_.string(), {});
  }
  std::string Bytes(const char* file) const { return ReadFile(directory_ / file).value(); }

  // Writes a speculator, with tensors changed by `edit`, which gets copies of them by name.
  template <typename Edit>
  void Write(const json& config, const Edit& edit) {
    if (tensors_.empty()) {
      ASSERT_TRUE(SaveSpeculator(*TinySpeculator(config), directory_.string()).ok());
      const auto files = SafetensorsDirectory::Open(directory_.string()).value();
      for (const TensorView& view : files->tensors()) tensors_[view.name] = ToAten(view);
    }
    Tensors changed;
    for (const auto& [name, tensor] : tensors_) changed[name] = tensor.clone();
    edit(changed);
    ASSERT_TRUE(WriteNamedTensors(directory_ / "model.safetensors",
                                  NamedTensors(changed.begin(), changed.end()))
                    .ok());
  }

  void ExpectInvalid(const std::string& tensor, const std::string& what) const {
    const absl::Status status = Load().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(directory_.string()), HasSubstr("tensor '" + tensor + "'"),
                      HasSubstr(what)));
  }

  static void ExpectSame(const Speculator& a, const Speculator& b) {
    ASSERT_EQ(a.parameters().size(), b.parameters().size());
    for (size_t i = 0; i < a.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(a.parameters()[i].value, b.parameters()[i].value))
          << a.parameters()[i].spec.name;
    }
  }

  fs::path directory_;
  Tensors tensors_;  // as SaveSpeculator wrote them
};

INSTANTIATE_TEST_SUITE_P(Kinds, SpeculatorFilesTest, testing::ValuesIn(Cases()), NameOf);

// With one step there is no second projection, and each tensor is there once. The MLP speculator
// then refuses to tie its steps, as the published one does.
TEST_P(SpeculatorFilesTest, OneStepIsBuiltSavedAndLoaded) {
  json config = GetParam().config;
  config["n_predict"] = 1;
  const ConfigFields fields(config, "config.json");
  const SpeculatorKind& kind = *KindOfConfig(fields).value();
  if (kind.name == "mlp" && config.value("tie_weights", false)) {
    EXPECT_EQ(FieldPath(RandomSpeculator(kind, fields, 1, {}).status()), "config.json.tie_weights");
    return;
  }
  const auto speculator = TinySpeculator(config);
  ASSERT_TRUE(SaveSpeculator(*speculator, directory_.string()).ok());
  const auto loaded = Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSame(*speculator, **loaded);
  const at::Tensor hidden = at::randn({4, kHidden});
  const at::Tensor tokens = at::tensor({1, 2, 3, 4}, at::kLong);
  const auto drafts = speculator->Draft(hidden, tokens, 1),
             again = (*loaded)->Draft(hidden, tokens, 1);
  ASSERT_TRUE(drafts.ok()) << drafts.status();
  EXPECT_TRUE(at::equal(*drafts, *again));
}

TEST_P(SpeculatorFilesTest, SavedLoadedAndSavedAgainIsTheSameToTheByte) {
  json config = GetParam().config;
  config["base_model_name_or_path"] = "base";
  auto speculator = TinySpeculator(config);
  speculator->KeepOtherKeys(config);
  ASSERT_TRUE(SaveSpeculator(*speculator, directory_.string()).ok());
  const std::string weights = Bytes("model.safetensors"), text = Bytes("config.json");
  EXPECT_EQ(json::parse(text)["base_model_name_or_path"], "base");
  EXPECT_EQ(json::parse(text)["torch_dtype"], "float32");
  const auto loaded = Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSame(**loaded, *speculator);
  fs::remove_all(directory_);
  ASSERT_TRUE(SaveSpeculator(**loaded, directory_.string()).ok());
  EXPECT_EQ(Bytes("model.safetensors"), weights);
  EXPECT_EQ(Bytes("config.json"), text);
}

TEST_P(SpeculatorFilesTest, NamesMayHaveThePrefixOrNot) {
  for (const std::string prefix : {"", "speculator."}) {
    Write(GetParam().config, [&](Tensors& tensors) {
      Tensors renamed;
      for (const auto& [name, tensor] : tensors) {
        const size_t begin = name.rfind("speculator.", 0) == 0 ? 11 : 0;
        renamed[prefix + name.substr(begin)] = tensor;
      }
      tensors = renamed;
    });
    const auto loaded = Load();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    ExpectSame(**loaded, *TinySpeculator(GetParam().config));
  }
}

TEST_P(SpeculatorFilesTest, TiedTensorsMayBeStoredOnce) {
  const auto speculator = TinySpeculator(GetParam().config);
  const std::string& prefix = speculator->kind().file_prefix;
  Write(GetParam().config, [&](Tensors& tensors) {
    for (const SpeculatorParameter& parameter : speculator->parameters()) {
      // All but the last name go.
      std::string name = parameter.spec.name;
      for (const std::string& next : parameter.repeats) {
        tensors.erase(prefix + name);
        name = next;
      }
    }
  });
  const auto loaded = Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectSame(**loaded, *speculator);
}

TEST_P(SpeculatorFilesTest, TiedTensorsMustBeEqual) {
  const auto speculator = TinySpeculator(GetParam().config);
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    if (parameter.repeats.empty()) continue;
    const std::string changed = speculator->kind().file_prefix + parameter.repeats.back();
    Write(GetParam().config, [&](Tensors& tensors) { tensors[changed].flatten()[0] += 1; });
    const absl::Status status = Load().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("though config.json ties them"));
  }
}

TEST_P(SpeculatorFilesTest, BadTensorsAreRefusedByName) {
  const auto speculator = TinySpeculator(GetParam().config);
  const std::string& prefix = speculator->kind().file_prefix;
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    const std::string name = prefix + parameter.spec.name;
    Write(GetParam().config, [&](Tensors& tensors) {
      tensors[name] = at::cat({tensors[name], tensors[name]});
    });
    ExpectInvalid(name, "expected [");
    Write(GetParam().config, [&](Tensors& tensors) { tensors[name] = tensors[name].to(at::kInt); });
    ExpectInvalid(name, "is not floating-point");
    if (!parameter.repeats.empty()) continue;
    Write(GetParam().config, [&](Tensors& tensors) { tensors.erase(name); });
    ExpectInvalid(parameter.spec.name, "missing");
  }
  Write(GetParam().config, [&](Tensors& tensors) {
    tensors["lm_head.weight"] = at::zeros({2, 2});
  });
  ExpectInvalid("lm_head.weight", "unexpected");
  Write(GetParam().config, [&](Tensors& tensors) {
    const at::Tensor head = tensors[prefix + "head.0.weight"];
    tensors["head.0.weight"] = tensors["speculator.head.0.weight"] = head;
  });
  ExpectInvalid("speculator.head.0.weight", "given twice");
}

TEST_P(SpeculatorFilesTest, HalfPrecisionFilesAreReadIntoFp32) {
  const auto speculator = TinySpeculator(GetParam().config);
  ASSERT_TRUE(SaveSpeculator(*speculator, directory_.string(), DType::kBFloat16).ok());
  EXPECT_EQ(json::parse(Bytes("config.json"))["torch_dtype"], "bfloat16");
  const auto loaded = Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->buffer().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal((*loaded)->head(0), speculator->head(0).to(at::kBFloat16).to(at::kFloat)));
}

TEST_P(SpeculatorFilesTest, PackedHeadsTakeLessMemoryAndHaveTheSameDigest) {
  const auto speculator = TinySpeculator(GetParam().config);
  ASSERT_TRUE(SaveSpeculator(*speculator, directory_.string()).ok());
  const auto packed = LoadSpeculator(directory_.string(), {.packs_heads = true}).value();
  EXPECT_EQ(packed->loaded_digest(), ManifestOf(*speculator).digest);
  EXPECT_EQ(Load().value()->loaded_digest(), ManifestOf(*speculator).digest);
  RoundHeads(*speculator);
  const at::Tensor hidden = at::arange(4 * kHidden, at::kFloat).view({4, kHidden}).sin();
  const at::Tensor tokens = at::tensor({3, 1, 4, 9}, at::kLong);
  EXPECT_TRUE(at::equal(packed->Draft(hidden, tokens, kSteps).value(),
                        speculator->Draft(hidden, tokens, kSteps).value()));

  const auto measured = [&](bool packs_heads) {
    return MeasureSpeculator(directory_.string(), kHidden, packs_heads).value();
  };
  int64_t saved = speculator->buffer().nbytes() - packed->buffer().nbytes();
  for (const SpeculatorParameter& parameter : packed->parameters()) {
    if (parameter.packed == nullptr) continue;
    saved -= kernels::PackedBytes(kernels::WeightFormat::kInt8, kVocabulary, kState);
  }
  EXPECT_EQ(measured(false).bytes, speculator->buffer().nbytes());
  EXPECT_EQ(measured(true).bytes, measured(false).bytes - saved);
  EXPECT_EQ(measured(true).largest_bytes, measured(false).largest_bytes);
}

TEST_P(SpeculatorFilesTest, ATruncatedFileIsRefused) {
  const auto speculator = TinySpeculator(GetParam().config);
  ASSERT_TRUE(SaveSpeculator(*speculator, directory_.string()).ok());
  const fs::path path = directory_ / "model.safetensors";
  fs::resize_file(path, fs::file_size(path) - 4);
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kDataLoss);
}

// The names of the published files, by hand.
struct Layout {
  json config;
  std::set<std::string> names;
};

class SpeculatorLayoutTest : public SpeculatorFilesTest {};

TEST_F(SpeculatorLayoutTest, NamesAreThePublishedOnes) {
  const json tied = {{"tie_weights", true}, {"n_predict", 3}};
  const std::set<std::string> mlp = {
      "speculator.emb.0.weight",  "speculator.emb.1.weight",  "speculator.emb.2.weight",
      "speculator.proj.0.weight", "speculator.proj.1.weight", "speculator.proj.2.weight",
      "speculator.head.0.weight", "speculator.head.1.weight", "speculator.head.2.weight",
      "speculator.ln.0.weight",   "speculator.ln.1.weight",   "speculator.ln.2.weight",
      "speculator.ln.0.bias",     "speculator.ln.1.bias",     "speculator.ln.2.bias"};
  const std::set<std::string> lstm = {
      "forget_emb.0.weight",  "input_emb.0.weight",  "output_emb.0.weight",  "cell_emb.0.weight",
      "forget_proj.0.weight", "input_proj.0.weight", "output_proj.0.weight", "cell_proj.0.weight",
      "forget_proj.1.weight", "input_proj.1.weight", "output_proj.1.weight", "cell_proj.1.weight",
      "cell_ln.0.weight",     "cell_ln.0.bias",      "state_ln.0.weight",    "state_ln.0.bias",
      "head.0.weight",        "head.1.weight",       "head.2.weight"};
  const std::vector<Layout> layouts = {
      {MlpJson(), mlp},
      {MlpJson(tied), mlp},
      {ArcticJson(),
       {"emb.0.0.weight", "emb.1.0.weight", "emb.2.0.weight", "proj.0.0.weight", "proj.1.0.weight",
        "proj.2.0.weight", "ln.0.0.weight", "ln.1.0.weight", "ln.2.0.weight", "ln.0.0.bias",
        "ln.1.0.bias", "ln.2.0.bias", "head.0.weight", "head.1.weight", "head.2.weight"}},
      {ArcticJson(tied),
       {"emb.0.0.weight", "proj.0.0.weight", "proj.1.0.weight", "ln.0.0.weight", "ln.0.0.bias",
        "head.0.weight", "head.1.weight", "head.2.weight"}},
      {ArcticJson({{"method", "sum_lstm"}, {"tie_weights", true}}), lstm},
      {ArcticJson({{"method", "sum_lstm"}, {"tie_weights", true}, {"tie_lstm_embs", true}}), lstm},
  };
  for (const Layout& layout : layouts) {
    ASSERT_TRUE(SaveSpeculator(*TinySpeculator(layout.config), directory_.string()).ok());
    const auto files = SafetensorsDirectory::Open(directory_.string()).value();
    std::set<std::string> names;
    for (const TensorView& view : files->tensors()) names.insert(view.name);
    EXPECT_EQ(names, layout.names) << layout.config;
  }
}

TEST_F(SpeculatorLayoutTest, ThePublishedFormsOfTheArchitectureAreRead) {
  for (const json& architectures : {json("MLPSpeculatorPreTrainedModel"),
                                    json::array({"ArcticMLPSpeculatorPreTrainedModel"})}) {
    ASSERT_TRUE(SaveSpeculator(*TinySpeculator(MlpJson()), directory_.string()).ok());
    json config = json::parse(Bytes("config.json"));
    config["architectures"] = architectures;
    std::ofstream(directory_ / "config.json") << config;
    const auto loaded = Load();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ((*loaded)->kind().name, "mlp");
    EXPECT_EQ((*loaded)->config()["architectures"], json::array({"MLPSpeculatorPreTrainedModel"}));
  }
}

TEST_F(SpeculatorLayoutTest, OtherDirectoriesAreRefused) {
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kNotFound);
  std::ofstream(directory_ / "config.json") << "[]";
  EXPECT_EQ(FieldPath(Load().status()), "config.json");
  std::ofstream(directory_ / "config.json") << MlpJson({{"architectures", {"LlamaForCausalLM"}}});
  EXPECT_EQ(FieldPath(Load().status()), "config.json.architectures");
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kUnimplemented);
  std::ofstream(directory_ / "config.json") << MlpJson();
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kNotFound);
  std::ofstream(directory_ / "pytorch_model.bin") << "x";
  EXPECT_EQ(Load().status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(Load().status().message()), HasSubstr("pytorch_model.bin"));
}

}  // namespace
}  // namespace tandem::speculator
