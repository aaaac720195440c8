// Tiny models with random weights for tests: odd shapes, fast, no files needed.
#ifndef TANDEM_COMMON_MODEL_TESTING_MODELS_H_
#define TANDEM_COMMON_MODEL_TESTING_MODELS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/model/config/model_config.h"
#include "common/model/family.h"
#include "common/model/model.h"

namespace tandem {

// The model_type of every family.
inline std::vector<std::string> EveryFamily() {
  std::vector<std::string> names;
  for (const Family* family : Families()) names.push_back(family->model_type());
  return names;
}

// A config.json with grouped heads and head_dim != hidden / heads. `changes` are merged in, under
// the family's names for them.
inline nlohmann::json TinyConfigJson(const std::string& model_type = "llama",
                                     const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json config = {{"model_type", model_type},
                           {"vocab_size", 61},
                           {"hidden_size", 30},
                           {"intermediate_size", 43},
                           {"num_hidden_layers", 2},
                           {"num_attention_heads", 6},
                           {"num_key_value_heads", 2},
                           {"head_dim", 10},
                           {"max_position_embeddings", 256},
                           {"rms_norm_eps", 1e-5},
                           {"rope_theta", 500.0},
                           {"hidden_act", "silu"},
                           {"tie_word_embeddings", false},
                           {"initializer_range", 0.2},
                           {"eos_token_id", 2},
                           {"bos_token_id", 1},
                           {"architectures", {"ForCausalLM"}}};
  if (model_type == "mistral") config["sliding_window"] = 5;
  if (model_type == "qwen2_vl" || model_type == "qwen2_5_vl") {
    const bool is_first = model_type == "qwen2_vl";
    config["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {1, 2, 2}}};
    config["image_token_id"] = 57;
    config["video_token_id"] = 58;
    config["vision_config"] = {{"depth", 2}, {"num_heads", 2}, {"patch_size", 3}};
    const int hidden_size = changes.is_object() ? changes.value("hidden_size", 30) : 30;
    config["vision_config"].update(
        is_first ? nlohmann::json{{"embed_dim", 16}, {"hidden_size", hidden_size}, {"mlp_ratio", 2}}
                 : nlohmann::json{{"hidden_size", 16},
                                  {"out_hidden_size", hidden_size},
                                  {"intermediate_size", 23},
                                  {"window_size", 12},
                                  {"fullatt_block_indexes", {1}}});
  }
  if (model_type == "deepseek_v3") {
    config.merge_patch({{"q_lora_rank", 11},
                        {"kv_lora_rank", 13},
                        {"qk_nope_head_dim", 7},
                        {"qk_rope_head_dim", 6},
                        {"v_head_dim", 5},
                        {"first_k_dense_replace", 1},
                        {"n_routed_experts", 6},
                        {"n_group", 3},
                        {"topk_group", 2},
                        {"moe_intermediate_size", 12}});
  }
  if (model_type == "gemma2" || model_type == "gemma3_text") {
    config["sliding_window"] = 5;  // of the first layer
    if (model_type == "gemma3_text") config["sliding_window_pattern"] = 2;
    if (model_type == "gemma2") {
      config["attn_logit_softcapping"] = 1.5;
      config["final_logit_softcapping"] = 2.0;
    }
    config["query_pre_attn_scalar"] = 14;
    config.erase("hidden_act");
  }
  if (model_type == "phi3") config["partial_rotary_factor"] = 0.6;
  if (model_type == "mixtral") config["num_local_experts"] = 5;
  if (model_type == "qwen2_moe" || model_type == "qwen3_moe") {
    config["num_experts"] = 5;
    config["mlp_only_layers"] = nlohmann::json::array({1});
    config["moe_intermediate_size"] = 12;
  }
  if (model_type == "qwen2_moe") config["shared_expert_intermediate_size"] = 20;
  config["num_experts_per_tok"] = 2;
  if (changes.is_object()) config.merge_patch(changes);  // `{}` arrives as null
  if (model_type == "mixtral" && config.contains("num_experts")) {
    config["num_local_experts"] = config["num_experts"];
    config.erase("num_experts");
  }
  if (model_type == "deepseek_v3") {
    config["num_key_value_heads"] = config["num_attention_heads"];
    config.erase("head_dim");  // it has qk_rope_head_dim
    // Here null is not the default, but no rank.
    if (changes.is_object() && changes.contains("q_lora_rank")) {
      config["q_lora_rank"] = changes["q_lora_rank"];
    }
  }
  return config;
}

// Aborts on an error: a test's own config is right.
inline ModelConfig TinyConfig(const std::string& model_type = "llama",
                              const nlohmann::json& changes = nlohmann::json::object()) {
  return ParseModelConfig(TinyConfigJson(model_type, changes).dump()).value();
}

inline std::unique_ptr<Model> TinyModel(const std::string& model_type = "llama",
                                        const nlohmann::json& changes = nlohmann::json::object(),
                                        const LoadOptions& options = {}, uint64_t seed = 1) {
  return std::move(Model::Random(TinyConfig(model_type, changes), seed, options)).value();
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_TESTING_MODELS_H_
