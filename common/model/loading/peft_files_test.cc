#include "common/model/loading/peft_files.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/files/atomic_file.h"
#include "common/model/testing/tiny_model_dir.h"

namespace tandem {
namespace {

using nlohmann::json;

// Returns the adapter_config.json of a plain adapter as PEFT writes it, with `changes`.
json Config(const json& changes) {
  json config = {{"peft_type", "LORA"},
                 {"r", 4},
                 {"lora_alpha", 6},
                 {"lora_dropout", 0.0},
                 {"target_modules", {"q_proj", "o_proj"}},
                 {"bias", "none"},
                 {"fan_in_fan_out", false},
                 {"init_lora_weights", true},
                 {"use_rslora", false},
                 {"use_dora", false},
                 {"use_qalora", false},
                 {"qalora_group_size", 16},
                 {"lora_bias", false},
                 {"layers_to_transform", nullptr},
                 {"rank_pattern", json::object()},
                 {"alpha_pattern", json::object()},
                 {"loftq_config", json::object()},
                 {"modules_to_save", nullptr}};
  config.update(changes);
  return config;
}

class PeftFilesTest : public ::testing::Test {
 protected:
  LoraOptions Written(const json& changes) {
    const std::string file = folder_ / kAdapterConfigFile;
    EXPECT_TRUE(WriteFileDurably(file, Config(changes).dump()).ok());
    return {.path = folder_.path()};
  }

  const TemporaryFolder folder_;
};

TEST_F(PeftFilesTest, PlainAdaptersAreRead) {
  for (const json& init : {json(true), json(false), json(nullptr), json("gaussian"),
                           json("orthogonal"), json("eva")}) {
    const auto resolved = ResolveLora(Written({{"init_lora_weights", init}}));
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(resolved->rank, 4);
    EXPECT_EQ(resolved->alpha, 6);
    EXPECT_EQ(resolved->target_modules, (std::vector<std::string>{"o_proj", "q_proj"}));
  }
}

// Another formula than W x + (alpha / rank) B A x, or more that trains.
TEST_F(PeftFilesTest, OtherFormulasAreRefusedByTheirKey) {
  const json others = {{"peft_type", "IA3"},
                       {"bias", "lora_only"},
                       {"use_rslora", true},
                       {"use_dora", true},
                       {"use_qalora", true},
                       {"fan_in_fan_out", true},
                       {"lora_bias", true},
                       {"rank_pattern", {{"q_proj", 8}}},
                       {"alpha_pattern", {{"q_proj", 8}}},
                       {"layers_to_transform", 0},
                       {"layer_replication", {{0, 2}}},
                       {"target_parameters", {"mlp.experts.gate_up_proj"}},
                       {"exclude_modules", {"q_proj"}},
                       {"trainable_token_indices", {5}},
                       {"alora_invocation_tokens", {5, 7}},
                       {"arrow_config", {{"top_k", 3}}},
                       {"kasa_config", {{"beta", 1e-4}}},
                       {"monteclora_config", {{"num_samples", 8}}},
                       {"use_bdlora", {{"nblocks", 2}}},
                       {"target_modules", "(q|v)_proj"}};
  for (const auto& [key, value] : others.items()) {
    const absl::Status status = ResolveLora(Written({{key, value}})).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << key << " " << status;
    EXPECT_EQ(FieldPath(status), absl::StrCat("adapter_config.json.", key));
  }
  // These subtract the first values of the adapters from the weights of the base model.
  for (const char* init :
       {"pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica"}) {
    const absl::Status status = ResolveLora(Written({{"init_lora_weights", init}})).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << init << " " << status;
    EXPECT_EQ(FieldPath(status), "adapter_config.json.init_lora_weights");
  }
}

TEST_F(PeftFilesTest, DropoutIsANumber) {
  EXPECT_TRUE(NoteDropout({}).ok());
  for (const json& dropout : {json(0), json(0.0), json(0.1), json(nullptr)}) {
    EXPECT_TRUE(NoteDropout(Written({{"lora_dropout", dropout}})).ok());
  }
  EXPECT_EQ(FieldPath(NoteDropout(Written({{"lora_dropout", "high"}}))),
            "adapter_config.json.lora_dropout");
}

}  // namespace
}  // namespace tandem
