#include "common/model/config/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/errors/error.h"
#include "common/model/config/rope_config.h"
#include "common/model/passes/rope.h"
#include "common/model/testing/models.h"

namespace tandem {
namespace {

using nlohmann::json;

absl::StatusOr<ModelConfig> Parse(const json& changes, const std::string& generation = "") {
  return ParseModelConfig(TinyConfigJson("llama", changes).dump(), generation);
}

void ExpectFieldError(const json& changes, absl::StatusCode code, const std::string& path) {
  const absl::Status status = Parse(changes).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(FieldPath(status), path) << status;
}

json LongRope(const json& short_factor, const json& long_factor) {
  return {{"rope_scaling",
           {{"type", "longrope"},
            {"short_factor", short_factor},
            {"long_factor", long_factor},
            {"original_max_position_embeddings", 64}}}};
}

TEST(ModelConfigTest, ReadsTheArchitecture) {
  const ModelConfig config = Parse(json::object()).value();
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.head_dim, 10);
  EXPECT_EQ(config.query_size(), 60);
  EXPECT_EQ(config.key_value_size(), 20);
  EXPECT_EQ(config.rope.theta, 500.0);
  EXPECT_EQ(config.eos_token_ids, std::vector<int64_t>{2});
}

TEST(ModelConfigTest, HeadDimAndKeyValueHeadsHaveDefaults) {
  const ModelConfig config =
      Parse({{"head_dim", nullptr}, {"hidden_size", 36}, {"num_key_value_heads", nullptr}}).value();
  EXPECT_EQ(config.head_dim, 6);
  EXPECT_EQ(config.num_key_value_heads, 6);
}

absl::StatusOr<ModelConfig> ParseVision(const char* family, const json& changes) {
  return ParseModelConfig(TinyConfigJson(family, changes).dump());
}

// Moves what a text model has into an object of its own.
json Nested(const char* family) {
  json config = TinyConfigJson(family), text = json::object();
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "num_key_value_heads", "head_dim", "rope_scaling",
                          "rope_theta", "rms_norm_eps", "eos_token_id", "tie_word_embeddings"}) {
    text[key] = config[key];
    config.erase(key);
  }
  config["text_config"] = text;
  return config;
}

TEST(VisionConfigTest, BothStylesGiveTheSameModel) {
  for (const char* family : {"qwen2_vl", "qwen2_5_vl"}) {
    json nested = Nested(family);
    const ModelConfig one = TinyConfig(family), other = ParseModelConfig(nested.dump()).value();
    EXPECT_EQ(one.hidden_size, other.hidden_size);
    EXPECT_EQ(one.rope.theta, other.rope.theta);
    EXPECT_EQ(one.rope.mrope_section, (std::vector<int64_t>{1, 2, 2}));
    EXPECT_EQ(one.rope.mrope_section, other.rope.mrope_section);
    EXPECT_EQ(one.eos_token_ids, other.eos_token_ids);
    EXPECT_FALSE(other.tie_word_embeddings);
    EXPECT_EQ(other.text_path, "text_config.");
    nested["text_config"]["tie_word_embeddings"] = true;
    EXPECT_TRUE(ParseModelConfig(nested.dump())->tie_word_embeddings);
    nested["text_config"]["hidden_size"] = 0;
    EXPECT_EQ(FieldPath(ParseModelConfig(nested.dump()).status()),
              "config.json.text_config.hidden_size");
  }
}

TEST(VisionConfigTest, DefaultsAreThoseOfTransformers) {
  const json no_rope = {{"rope_theta", nullptr}, {"rms_norm_eps", nullptr}};
  EXPECT_EQ(ParseVision("qwen2_vl", no_rope)->rope.theta, 1e6);
  EXPECT_EQ(ParseVision("qwen2_vl", no_rope)->rms_norm_eps, 1e-5);
  const json wide = {{"head_dim", 128}, {"rope_scaling", nullptr}};
  EXPECT_EQ(ParseVision("qwen2_5_vl", wide)->rope.mrope_section,
            (std::vector<int64_t>{16, 24, 24}));
  const VisionConfig vision = *TinyConfig("qwen2_5_vl").vision;
  EXPECT_EQ(vision.tokens_per_second, 4.0);
  EXPECT_EQ(vision.rope_theta, 10000.0);
  EXPECT_EQ(vision.patch_values(), 54);
}

TEST(VisionConfigTest, WhatDoesNotFitIsRefusedByName) {
  const auto expect = [](const char* family, const json& changes, absl::StatusCode code,
                         const std::string& field) {
    const absl::Status status = ParseVision(family, changes).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), "config.json." + field) << status;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument,
                 kUnimplemented = absl::StatusCode::kUnimplemented;
  for (const char* family : {"qwen2_vl", "qwen2_5_vl"}) {
    expect(family, {{"vision_config", {{"hidden_act", "relu"}}}}, kUnimplemented,
           "vision_config.hidden_act");
    expect(family, {{"vision_config", {{"rope_parameters", {{"rope_type", "yarn"}}}}}},
           kUnimplemented, "vision_config.rope_parameters.rope_type");
    expect(family, {{"vision_config", {{"patch_size", 1000}}}}, kInvalid,
           "vision_config.patch_size");
    expect(family, {{"vision_config", {{"depth", 1 << 20}}}}, kInvalid, "vision_config.depth");
    expect(family, {{"image_token_id", 61}}, kInvalid, "image_token_id");
    expect(family, {{"use_sliding_window", true}}, kUnimplemented, "use_sliding_window");
    expect(family, {{"rope_scaling", {{"mrope_section", {1, 2, 3}}}}}, kInvalid,
           "rope_scaling.mrope_section");
    expect(family, {{"rope_scaling", {{"mrope_section", {1.5, 1.5, 2}}}}}, kInvalid,
           "rope_scaling.mrope_section");
    expect(family, {{"rope_scaling", nullptr}}, kInvalid, "rope_parameters.mrope_section");
  }
  expect("qwen2_vl", {{"vision_config", {{"embed_dim", 18}}}}, kInvalid, "vision_config.embed_dim");
  expect("qwen2_vl", {{"vision_config", {{"hidden_size", 31}}}}, kInvalid,
         "vision_config.hidden_size");
  expect("qwen2_5_vl", {{"vision_config", {{"out_hidden_size", 31}}}}, kInvalid,
         "vision_config.out_hidden_size");
  expect("qwen2_5_vl", {{"vision_config", {{"window_size", 5}}}}, kInvalid,
         "vision_config.window_size");
  // Three positions in a family whose tokens have one.
  expect("qwen2", {{"rope_scaling", {{"type", "mrope"}, {"mrope_section", {1, 2, 2}}}}},
         kUnimplemented, "rope_parameters.mrope_section");
}

TEST(ModelConfigTest, TheEpsilonOfNormsHasTheDefaultOfTheFamily) {
  const auto default_of = [](const char* family) {
    return TinyConfig(family, {{"rms_norm_eps", nullptr}}).rms_norm_eps;
  };
  EXPECT_EQ(default_of("llama"), 1e-6);
  EXPECT_EQ(default_of("olmo2"), 1e-5);
  EXPECT_EQ(default_of("phi3"), 1e-5);
}

TEST(ModelConfigTest, LatentAttentionIsReadWithTheDefaultsOfTransformers) {
  const ModelConfig tiny = TinyConfig("deepseek_v3", {{"q_lora_rank", 7}, {"head_dim", 6}});
  EXPECT_EQ(tiny.head_dim, 6) << "the width that is rotated";
  EXPECT_EQ(tiny.decoder.latent->q_lora_rank, 7);
  EXPECT_EQ(tiny.decoder.latent->cached_dim(), 13 + 6);
  nlohmann::json sparse = TinyConfigJson("deepseek_v3");
  for (const char* key : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                          "v_head_dim", "num_nextn_predict_layers"}) {
    sparse.erase(key);
  }
  const ModelConfig config = ParseModelConfig(sparse.dump()).value();
  const LatentAttentionOptions& latent = *config.decoder.latent;
  EXPECT_EQ(latent.q_lora_rank, 1536);
  EXPECT_EQ(latent.kv_lora_rank, 512);
  EXPECT_EQ(latent.qk_head_dim(), 128 + 64);
  EXPECT_EQ(latent.v_head_dim, 128);
  EXPECT_TRUE(latent.rope_interleave);
  EXPECT_EQ(config.decoder.num_nextn_predict_layers, 1);
  sparse["q_lora_rank"] = nullptr;
  EXPECT_EQ(ParseModelConfig(sparse.dump()).value().decoder.latent->q_lora_rank, 0);
}

TEST(ModelConfigTest, WhatLatentAttentionCannotBeIsRefused) {
  const auto refused = [](const char* field, absl::StatusCode code, const json& value) {
    nlohmann::json config = TinyConfigJson("deepseek_v3");
    config[field] = value;
    const absl::Status status = ParseModelConfig(config.dump()).status();
    EXPECT_EQ(status.code(), code) << status;
    return FieldPath(status);
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto unimplemented = absl::StatusCode::kUnimplemented;
  for (const char* field : {"kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"}) {
    EXPECT_EQ(refused(field, invalid, 0), absl::StrCat("config.json.", field));
  }
  EXPECT_EQ(refused("qk_rope_head_dim", invalid, 5), "config.json.qk_rope_head_dim");
  EXPECT_EQ(refused("head_dim", invalid, 10), "config.json.head_dim");
  EXPECT_EQ(refused("num_key_value_heads", invalid, 2), "config.json.num_key_value_heads");
  EXPECT_EQ(refused("rope_scaling", unimplemented,
                    {{"rope_type", "linear"}, {"factor", 2.0}, {"mscale_all_dim", 1.0}}),
            "config.json.rope_scaling.mscale_all_dim");
}

TEST(ModelConfigTest, ExpertsHaveTheKeysAndDefaultsOfTheFamily) {
  const ExpertOptions mixtral = TinyConfig("mixtral").decoder.experts;
  EXPECT_EQ(mixtral.routing.num_experts, 5);
  EXPECT_EQ(mixtral.intermediate_size, 43);
  EXPECT_TRUE(mixtral.routing.norm_topk_prob);
  const json no_counts = {{"num_experts_per_tok", nullptr}, {"num_local_experts", nullptr}};
  EXPECT_EQ(TinyConfig("mixtral", no_counts).decoder.experts.routing.num_experts_per_tok, 2);
  EXPECT_EQ(TinyConfig("mixtral", no_counts).decoder.experts.routing.num_experts, 8);
  // The key that `transformers` writes since version 5.
  const json new_key = {{"num_experts", nullptr}, {"num_local_experts", 4}};
  EXPECT_EQ(TinyConfig("qwen3_moe", new_key).decoder.experts.routing.num_experts, 4);
  const ExpertOptions qwen2 = TinyConfig("qwen2_moe").decoder.experts;
  EXPECT_EQ(qwen2.shared_intermediate_size, 20);
  EXPECT_TRUE(qwen2.shared_gate);
  EXPECT_FALSE(qwen2.routing.norm_topk_prob);
}

TEST(ModelConfigTest, DenseLayersAreThoseOfTheKeys) {
  const auto layers = [](const json& changes) {
    std::vector<bool> result;
    const ModelConfig config = TinyConfig("qwen3_moe", changes);
    for (int64_t i = 0; i < 6; ++i) result.push_back(config.decoder.experts.OfLayer(i));
    return result;
  };
  using Layers = std::vector<bool>;
  const json none = json::array();
  EXPECT_EQ(layers({{"mlp_only_layers", none}}), Layers({true, true, true, true, true, true}));
  EXPECT_EQ(layers({{"mlp_only_layers", {1, 4}}}), Layers({true, false, true, true, false, true}));
  EXPECT_EQ(layers({{"mlp_only_layers", {3}}, {"decoder_sparse_step", 2}}),
            Layers({false, true, false, false, false, true}));
  EXPECT_FALSE(TinyConfig("llama").decoder.experts.OfLayer(0));
}

TEST(ModelConfigTest, ExpertsThatDoNotFitAreRefusedByName) {
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto refused = [](const char* family, const json& changes, absl::StatusCode code,
                          const char* path) {
    const absl::Status status = ParseModelConfig(TinyConfigJson(family, changes).dump()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), path) << status;
  };
  refused("mixtral", {{"num_experts_per_tok", 6}}, kInvalid, "config.json.num_experts_per_tok");
  refused("mixtral", {{"router_jitter_noise", 0.1}}, kUnimplemented,
          "config.json.router_jitter_noise");
  refused("qwen2_moe", {{"moe_intermediate_size", 0}}, kInvalid,
          "config.json.moe_intermediate_size");
  refused("qwen3_moe", {{"mlp_only_layers", {-1}}}, kInvalid, "config.json.mlp_only_layers");
  refused("qwen3_moe", {{"decoder_sparse_step", 0}}, kInvalid, "config.json.decoder_sparse_step");
}

TEST(ModelConfigTest, TwoNamesOfANumberMustAgree) {
  json config = TinyConfigJson("mixtral");
  config["num_experts"] = 5;
  EXPECT_EQ(ParseModelConfig(config.dump())->decoder.experts.routing.num_experts, 5);
  config["num_experts"] = 6;
  EXPECT_EQ(FieldPath(ParseModelConfig(config.dump()).status()), "config.json.num_experts");
}

TEST(ModelConfigTest, ShardsThatDoNotDivideAreRefusedByTheKeysOfTheFamily) {
  const auto expect = [](const char* family, json changes, const std::string& message) {
    const json even = {
        {"num_attention_heads", 8}, {"num_key_value_heads", 4}, {"intermediate_size", 48}};
    for (const auto& [key, value] : even.items()) {
      if (!changes.contains(key)) changes[key] = value;
    }
    const ModelConfig config = TinyConfig(family, changes);
    const absl::Status status =
        FindFamily(family).value()->CheckShards(config, 4, /*whole_experts=*/false, "ranks");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(FieldPath(status), "ranks");
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("4 does not divide config.json." + message));
  };
  expect("mistral", {{"num_key_value_heads", 2}}, "num_key_value_heads, which is 2");
  expect("gemma3_text", {{"intermediate_size", 50}}, "intermediate_size, which is 50");
  expect("mixtral", {{"intermediate_size", 50}}, "intermediate_size, which is 50");
  expect("qwen3_moe", {{"moe_intermediate_size", 14}}, "moe_intermediate_size, which is 14");
  expect("qwen2_moe", {{"shared_expert_intermediate_size", 18}},
         "shared_expert_intermediate_size, which is 18");
  expect("deepseek_v3", {{"num_attention_heads", 6}}, "num_attention_heads, which is 6");
  expect("deepseek_v3", {{"moe_intermediate_size", 14}}, "moe_intermediate_size, which is 14");
  expect("qwen2_vl", {{"num_key_value_heads", 2}}, "num_key_value_heads, which is 2");
}

TEST(ModelConfigTest, ExpertsOfDeepseekLieBehindTheFirstLayers) {
  const ModelConfig config =
      TinyConfig("deepseek_v3", {{"first_k_dense_replace", 1}, {"n_shared_experts", 2}});
  EXPECT_FALSE(config.decoder.experts.OfLayer(0));
  EXPECT_TRUE(config.decoder.experts.OfLayer(1));
  EXPECT_EQ(config.decoder.experts.shared_intermediate_size, 2 * 12);
  EXPECT_FALSE(
      TinyConfig("deepseek_v3", {{"first_k_dense_replace", 2}}).decoder.experts.OfLayer(1));
  const json groups = {{"first_k_dense_replace", 1}, {"n_group", 4}};
  EXPECT_EQ(FieldPath(ParseModelConfig(TinyConfigJson("deepseek_v3", groups).dump()).status()),
            "config.json.n_group");
}

TEST(ModelConfigTest, BothStylesOfRopeAreRead) {
  const ModelConfig old_style =
      Parse({{"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}}}).value();
  EXPECT_EQ(old_style.rope.type, RopeConfig::Type::kLinear);
  EXPECT_EQ(old_style.rope.theta, 500.0);
  EXPECT_EQ(old_style.rope.factor, 4.0);
  const ModelConfig new_style = Parse({{"rope_theta", nullptr},
                                       {"rope_parameters",
                                        {{"rope_type", "llama3"},
                                         {"rope_theta", 7.0},
                                         {"factor", 8.0},
                                         {"low_freq_factor", 1.0},
                                         {"high_freq_factor", 4.0},
                                         {"original_max_position_embeddings", 64}}}})
                                    .value();
  EXPECT_EQ(new_style.rope.type, RopeConfig::Type::kLlama3);
  EXPECT_EQ(new_style.rope.theta, 7.0);
}

TEST(ModelConfigTest, TheLongestSequenceHasOneRotation) {
  // 256 positions. Beyond 64 tokens the longrope model would rotate all positions otherwise.
  const json factors = {1, 2, 3, 4, 5}, others = {1, 2, 3, 4, 6};
  EXPECT_EQ(Parse(LongRope(factors, others)).value().LongestSequence(1000), 64);
  EXPECT_EQ(Parse(LongRope(factors, others)).value().LongestSequence(20), 20);
  EXPECT_EQ(Parse(LongRope(factors, factors)).value().LongestSequence(1000), 256);
  const json dynamic = {{"rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}}}};
  EXPECT_EQ(Parse(dynamic).value().LongestSequence(1000), 256);
}

TEST(ModelConfigTest, StopTokensAreTheUnionOfBothFiles) {
  const auto config = Parse({{"eos_token_id", {9, 4}}}, R"({"eos_token_id": [4, 2]})");
  EXPECT_EQ(config.value().eos_token_ids, (std::vector<int64_t>{2, 4, 9}));
}

TEST(ModelConfigTest, StopTokensOfTheClassAreForFilesWithoutAny) {
  const json none = {{"eos_token_id", nullptr}};  // removed
  EXPECT_EQ(Parse(none)->eos_token_ids, std::vector<int64_t>{2});
  EXPECT_EQ(Parse(none, R"({"eos_token_id": 9})")->eos_token_ids, std::vector<int64_t>{9});
  json config = TinyConfigJson();
  config["eos_token_id"] = nullptr;
  EXPECT_TRUE(ParseModelConfig(config.dump())->eos_token_ids.empty());
}

TEST(ModelConfigTest, WrongFieldsAreNamed) {
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectFieldError({{"hidden_size", "30"}}, kInvalid, "config.json.hidden_size");
  ExpectFieldError({{"vocab_size", -1}}, kInvalid, "config.json.vocab_size");
  ExpectFieldError({{"num_key_value_heads", 4}}, kInvalid, "config.json.num_key_value_heads");
  ExpectFieldError({{"head_dim", 7}}, kInvalid, "config.json.head_dim");
  ExpectFieldError({{"head_dim", nullptr}, {"hidden_size", 31}}, kInvalid,
                   "config.json.hidden_size");
  ExpectFieldError({{"rms_norm_eps", 0}}, kInvalid, "config.json.rms_norm_eps");
  ExpectFieldError({{"eos_token_id", "</s>"}}, kInvalid, "config.json.eos_token_id");
  ExpectFieldError({{"model_type", nullptr}}, kInvalid, "config.json.model_type");
  for (const char* type : {"linear", "dynamic", "llama3"}) {
    ExpectFieldError({{"rope_scaling", {{"rope_type", type}}}}, kInvalid,
                     "config.json.rope_scaling.factor");
  }
  ExpectFieldError(LongRope({1, 1, 1, 1}, {1, 1, 1, 1, 1}), kInvalid,
                   "config.json.rope_scaling.short_factor");
  ExpectFieldError(LongRope({1, 1, 1, 1, 1}, {1, 1, 0, 1, 1}), kInvalid,
                   "config.json.rope_scaling.long_factor");
  ExpectFieldError(LongRope({1, 1, 1, 1, 1}, nullptr), kInvalid,
                   "config.json.rope_scaling.long_factor");
}

TEST(ModelConfigTest, AnotherFamilyIsNamedBeforeSizesThatItCallsOtherwise) {
  const std::string gpt2 =
      R"({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12})";
  const absl::Status status = ParseModelConfig(gpt2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(),
            "config.json.model_type: gpt2 is not supported (llama, mistral, qwen2, qwen3, olmo2, "
            "deepseek_v3, gemma2, gemma3_text, mixtral, qwen2_moe, qwen3_moe, phi3, qwen2_vl, "
            "qwen2_5_vl are)");
}

TEST(ModelConfigTest, UnsupportedFeaturesAreUnimplemented) {
  const auto kNot = absl::StatusCode::kUnimplemented;
  ExpectFieldError({{"hidden_act", "gelu"}}, kNot, "config.json.hidden_act");
  ExpectFieldError({{"use_sliding_window", true}}, kNot, "config.json.use_sliding_window");
  ExpectFieldError({{"layer_types", {"full_attention", "sliding_attention"}}}, kNot,
                   "config.json.layer_types");
  ExpectFieldError({{"rope_scaling", {{"rope_type", "proportional"}, {"factor", 2.0}}}}, kNot,
                   "config.json.rope_scaling.rope_type");
  ExpectFieldError({{"rope_parameters", {{"full_attention", {{"rope_theta", 7.0}}}}}}, kNot,
                   "config.json.rope_parameters.full_attention");
  ExpectFieldError({{"partial_rotary_factor", 0.5}}, kNot, "config.json.partial_rotary_factor");
  ExpectFieldError({{"quantization_config", {{"bits", 4}}}}, kNot,
                   "config.json.quantization_config");
}

std::vector<int64_t> Windows(const std::string& family, const json& changes) {
  json config = TinyConfigJson(family, {{"num_hidden_layers", 4}});
  for (const auto& [key, value] : changes.items()) config[key] = value;  // null stays
  const ModelConfig parsed = ParseModelConfig(config.dump()).value();
  const Family* family_of = FindFamily(family).value();
  std::vector<int64_t> windows;
  for (const LayerCache& layer : family_of->CacheLayout(parsed, 1)) windows.push_back(layer.window);
  return windows;
}

TEST(ModelConfigTest, LayersHaveTheWindowsOfTheirFamily) {
  const int64_t none = kNoWindow;
  using Expected = std::vector<int64_t>;
  EXPECT_EQ(Windows("llama", {{"sliding_window", 7}}), (Expected{none, none, none, none}));
  EXPECT_EQ(Windows("mistral", {{"sliding_window", 7}}), (Expected{7, 7, 7, 7}));
  EXPECT_EQ(Windows("mistral", {{"sliding_window", nullptr}}), (Expected{none, none, none, none}));
  EXPECT_EQ(Windows("phi3", {{"sliding_window", 7}}), (Expected{7, 7, 7, 7}));
  EXPECT_EQ(Windows("phi3", json::object()), (Expected{none, none, none, none}));
  json without = TinyConfigJson("mistral", {{"sliding_window", nullptr}});  // removed
  EXPECT_EQ(ParseModelConfig(without.dump()).value().decoder.windows.OfLayer(0), 4096);
  for (const char* family : {"qwen2", "qwen3"}) {
    json qwen = {{"sliding_window", 7}, {"max_window_layers", 3}};
    EXPECT_EQ(Windows(family, qwen), (Expected{none, none, none, none}));
    qwen["use_sliding_window"] = true;
    EXPECT_EQ(Windows(family, qwen), (Expected{none, none, none, 7}));
    qwen["max_window_layers"] = 0;
    EXPECT_EQ(Windows(family, qwen), (Expected{7, 7, 7, 7}));
    qwen.erase("max_window_layers");  // 28
    EXPECT_EQ(Windows(family, qwen), (Expected{none, none, none, none}));
    qwen["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention",
                           "full_attention"};
    EXPECT_EQ(Windows(family, qwen), (Expected{7, none, 7, none}));
  }
}

TEST(ModelConfigTest, WrongWindowsAreNamed) {
  const auto expect = [](const std::string& family, const json& changes, absl::StatusCode code,
                         const std::string& field) {
    const absl::Status status = ParseModelConfig(TinyConfigJson(family, changes).dump()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), "config.json." + field) << status;
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect("mistral", {{"sliding_window", 0}}, kInvalid, "sliding_window");
  expect("qwen2", {{"use_sliding_window", true}, {"max_window_layers", -1}}, kInvalid,
         "max_window_layers");
  const json two = {"full_attention", "sliding_attention"};
  expect("qwen2", {{"layer_types", two}}, kInvalid, "layer_types");  // without use_sliding_window
  expect("qwen2", {{"use_sliding_window", true}, {"layer_types", two}, {"num_hidden_layers", 3}},
         kInvalid, "layer_types");
  expect("qwen3", {{"layer_types", {"full_attention", "linear_attention"}}},
         absl::StatusCode::kUnimplemented, "layer_types");
}

// The keys of a published config.json, most of which `transformers` has defaults for.
TEST(ModelConfigTest, Gemma3IsReadWithTheDefaultsOfTransformers) {
  const auto parsed = ParseModelConfig(R"({"model_type": "gemma3_text", "vocab_size": 262144,
      "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 7,
      "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768,
      "sliding_window": 512, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "attn_logit_softcapping": null, "final_logit_softcapping": null})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(parsed->tie_word_embeddings);
  EXPECT_EQ(parsed->head_dim, 256);
  EXPECT_EQ(parsed->decoder.attention_scale, 1.0 / 16);
  EXPECT_EQ(parsed->rope.theta, 1e6);
  EXPECT_EQ(parsed->rope.factor, 8.0);
  ASSERT_TRUE(parsed->window_rope.has_value());
  EXPECT_EQ(parsed->window_rope->theta, 1e4);
  EXPECT_EQ(parsed->window_rope->type, RopeConfig::Type::kDefault);
  for (int64_t layer = 0; layer < 7; ++layer) {
    EXPECT_EQ(parsed->decoder.windows.OfLayer(layer), layer == 5 ? kNoWindow : 512) << layer;
  }
}

// As the layers of `transformers`, which read the key and compute no cap of scores.
TEST(ModelConfigTest, Gemma3CapsLogitsAndNoScores) {
  const DecoderOptions options = TinyConfig("gemma3_text", {{"attn_logit_softcapping", 50.0},
                                                            {"final_logit_softcapping", 30.0}})
                                     .decoder;
  EXPECT_EQ(options.attention_soft_cap, std::nullopt);
  EXPECT_EQ(options.logit_soft_cap, 30.0);
}

// The keys of a published config.json.
TEST(ModelConfigTest, Gemma2IsReadWithTheDefaultsOfTransformers) {
  json published = json::parse(R"({"model_type": "gemma2", "vocab_size": 256000,
      "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
      "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
      "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 224})");
  const ModelConfig config = ParseModelConfig(published.dump()).value();
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.rope.theta, 1e4);
  EXPECT_EQ(config.decoder.attention_scale, 1.0 / std::sqrt(224.0));
  EXPECT_EQ(config.decoder.attention_soft_cap, 50.0);
  EXPECT_EQ(config.decoder.logit_soft_cap, 30.0);
  for (int64_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(config.decoder.windows.OfLayer(layer), layer % 2 == 0 ? 4096 : kNoWindow) << layer;
  }
  published.update({{"attn_logit_softcapping", nullptr}, {"final_logit_softcapping", nullptr}});
  const DecoderOptions without = ParseModelConfig(published.dump()).value().decoder;
  EXPECT_EQ(without.attention_soft_cap, std::nullopt);
  EXPECT_EQ(without.logit_soft_cap, std::nullopt);
  published["attn_logit_softcapping"] = -1;
  EXPECT_EQ(FieldPath(ParseModelConfig(published.dump()).status()),
            "config.json.attn_logit_softcapping");
}

TEST(ModelConfigTest, WhatGemma3LacksHereIsNamed) {
  const auto expect = [](const json& changes, absl::StatusCode code, const std::string& field) {
    const absl::Status status =
        ParseModelConfig(TinyConfigJson("gemma3_text", changes).dump()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), "config.json." + field) << status;
  };
  const auto kNot = absl::StatusCode::kUnimplemented, kInvalid = absl::StatusCode::kInvalidArgument;
  expect({{"final_logit_softcapping", 0}}, kInvalid, "final_logit_softcapping");
  expect({{"use_bidirectional_attention", true}}, kNot, "use_bidirectional_attention");
  expect({{"hidden_activation", "silu"}}, kNot, "hidden_activation");
  expect({{"rope_parameters", {{"rope_type", "default"}}}}, kNot, "rope_parameters.rope_type");
  expect({{"rope_parameters", {{"full_attention", {{"rope_type", "linear"}}}}}}, kInvalid,
         "rope_parameters.full_attention.factor");
  expect({{"query_pre_attn_scalar", 0}}, kInvalid, "query_pre_attn_scalar");
  expect({{"sliding_window_pattern", 0}}, kInvalid, "sliding_window_pattern");
  expect({{"layer_types", {"full_attention"}}}, kInvalid, "layer_types");
}

// The keys of a published config.json.
TEST(ModelConfigTest, Phi3IsReadWithTheDefaultsOfTransformers) {
  const json published = json::parse(R"({"model_type": "phi3", "vocab_size": 32064,
      "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 2,
      "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072,
      "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
      "sliding_window": 262144})");
  json config = published;
  const std::vector<double> divisors(36, 1.5);
  config["rope_scaling"] = {
      {"type", "su"}, {"short_factor", divisors}, {"long_factor", std::vector<double>(36, 2.0)}};
  const ModelConfig parsed = ParseModelConfig(config.dump()).value();
  EXPECT_EQ(parsed.rms_norm_eps, 1e-5);
  EXPECT_EQ(parsed.rope.rotary_dim, 72);
  EXPECT_EQ(parsed.rope.type, RopeConfig::Type::kLongRope);
  EXPECT_EQ(parsed.rope.frequency_divisors, divisors);
  EXPECT_EQ(parsed.rope.factor, 32.0);
  EXPECT_EQ(parsed.LongestSequence(1'000'000), 4096);
  EXPECT_EQ(parsed.decoder.windows.OfLayer(1), 262144);
  // The length of pre-training is 4096 unless config.json itself says another one.
  config.erase("original_max_position_embeddings");
  config["rope_scaling"]["original_max_position_embeddings"] = 8192;
  EXPECT_EQ(ParseModelConfig(config.dump()).value().LongestSequence(1'000'000), 4096);
  // The inner object's share of rotated columns comes first.
  config = published;
  config["rope_parameters"] = {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
  EXPECT_EQ(ParseModelConfig(config.dump()).value().rope.rotary_dim, 48);
  config["rope_parameters"]["partial_rotary_factor"] = 1.0;
  EXPECT_EQ(ParseModelConfig(config.dump()).value().rope.rotary_dim, std::nullopt);
}

TEST(ModelConfigTest, WhatPhi3CannotBeIsNamed) {
  const auto expect = [](const json& changes, absl::StatusCode code, const std::string& field) {
    const absl::Status status = ParseModelConfig(TinyConfigJson("phi3", changes).dump()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldPath(status), "config.json." + field) << status;
  };
  const auto kNot = absl::StatusCode::kUnimplemented, kInvalid = absl::StatusCode::kInvalidArgument;
  for (const double factor : {0.1, 0.5, 1.2}) {  // 1, 5 and 12 columns of 10
    expect({{"partial_rotary_factor", factor}}, kInvalid, "partial_rotary_factor");
  }
  for (const char* type : {"linear", "yarn"}) {
    expect({{"rope_scaling", {{"type", type}, {"factor", 2.0}}}}, kNot, "rope_scaling.type");
  }
  // As many divisors as frequencies: 3, of 6 columns.
  expect({{"rope_scaling",
           {{"type", "longrope"}, {"short_factor", {1, 1}}, {"long_factor", {1, 1, 1}}}}},
         kInvalid, "rope_scaling.short_factor");
}

TEST(ModelConfigTest, HostileTextIsRefused) {
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"),
                                  std::string(1'000'000, '['), std::string("{\"a\":1,\"a\":2}")}) {
    EXPECT_EQ(ParseModelConfig(text).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(LoadModelConfig("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(RopeTest, DefaultFrequenciesFallGeometrically) {
  const RopeFrequencies rope = ComputeRopeFrequencies({.theta = 10000.0}, 8);
  EXPECT_EQ(rope.attention_scaling, 1.0);
  ASSERT_EQ(rope.inverse.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(rope.inverse[i], std::pow(10.0, -i), 1e-7);
}

TEST(RopeTest, TablesGrowAheadUpToTheLongestSequence) {
  const auto bytes = [](const char* family, int64_t positions, int64_t longest) {
    return RotaryTableBytes(TinyConfig(family, {{"max_position_embeddings", positions}}), longest);
  };
  const int64_t position = 10 * 4;  // a cosine and a sine for five pairs
  EXPECT_EQ(bytes("llama", 256, 100), 256 * position);
  EXPECT_EQ(bytes("llama", 256, 1000), 256 * position) << "no sequence is longer";
  EXPECT_EQ(bytes("llama", 100000, 100), 512 * position);
  EXPECT_EQ(bytes("llama", 100000, 3000), 2 * 2999 * position);
  EXPECT_EQ(bytes("gemma3_text", 256, 100), 2 * 256 * position) << "layers with a window";
  EXPECT_EQ(bytes("deepseek_v3", 256, 100), 256 * 6 * 4) << "the width that is rotated";
}

}  // namespace
}  // namespace tandem
