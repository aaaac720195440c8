// Prints what the servers make of config.json, for comparison with the classes of `transformers`.
//
//   tandem-config-probe --keys > keys.json
//   tandem-config-probe --configs configs.json > resolved.json
//
// --keys prints the tables of keys of every family (common/model/config/config_keys.h) by
// model_type, object and key. --configs prints what each config.json of an array becomes: its
// "config", or its "error" and the "field" of the error.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/base/errors/error.h"
#include "common/model/config/config_keys.h"
#include "common/model/config/model_config.h"
#include "common/model/family.h"

namespace tandem {
namespace {

nlohmann::json ToJson(const ConfigKey& key) {
  const char* const fates[] = {"obeyed", "no effect", "only default"};
  nlohmann::json row = {{"fate", fates[static_cast<int>(key.fate)]},
                        {"value", nlohmann::json::parse(key.value)},
                        {"nullable", key.nullable}};
  if (key.other_name_of != nullptr) row["other_name_of"] = key.other_name_of;
  return row;
}

nlohmann::json AllKeys() {
  nlohmann::json families;
  for (const Family* family : Families()) {
    for (const ConfigSection& section : family->Keys()) {
      for (const ConfigKey& key : section.keys) {
        nlohmann::json& row = families[family->model_type()][section.object][key.name];
        if (!row.is_null())
          throw std::logic_error(family->model_type() + ": two rows of " + key.name);
        row = ToJson(key);
      }
    }
  }
  return families;
}

template <typename T>
nlohmann::json Maybe(const std::optional<T>& value) {
  return value.has_value() ? nlohmann::json(*value) : nlohmann::json();
}

nlohmann::json ToJson(const RopeConfig& rope) {
  return {{"type", static_cast<int>(rope.type)},
          {"theta", rope.theta},
          {"factor", rope.factor},
          {"original_max_position_embeddings", rope.original_max_position_embeddings},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"beta_fast", rope.beta_fast},
          {"beta_slow", rope.beta_slow},
          {"truncate", rope.truncate},
          {"mscale", Maybe(rope.mscale)},
          {"mscale_all_dim", Maybe(rope.mscale_all_dim)},
          {"attention_factor", Maybe(rope.attention_factor)},
          {"frequency_divisors", rope.frequency_divisors},
          {"rotary_dim", Maybe(rope.rotary_dim)},
          {"longest_sequence", Maybe(rope.longest_sequence)},
          {"mrope_section", rope.mrope_section}};
}

nlohmann::json ToJson(const VisionConfig& vision) {
  return {{"depth", vision.depth},
          {"width", vision.width},
          {"intermediate_size", vision.intermediate_size},
          {"num_heads", vision.num_heads},
          {"in_channels", vision.in_channels},
          {"patch_size", vision.patch_size},
          {"temporal_patch_size", vision.temporal_patch_size},
          {"spatial_merge_size", vision.spatial_merge_size},
          {"rope_theta", vision.rope_theta},
          {"window_size", vision.window_size},
          {"full_attention_layers", vision.full_attention_layers},
          {"tokens_per_second", vision.tokens_per_second},
          {"image_token_id", vision.image_token_id},
          {"video_token_id", vision.video_token_id}};
}

nlohmann::json ToJson(const DecoderOptions& options, int64_t num_layers) {
  std::vector<int64_t> windows;
  std::vector<bool> experts;
  for (int64_t i = 0; i < num_layers; ++i) {
    windows.push_back(options.windows.OfLayer(i));
    experts.push_back(options.experts.OfLayer(i));
  }
  const RoutingRule& rule = options.experts.routing;
  nlohmann::json json = {{"qkv_bias", options.qkv_bias},
                         {"output_bias", options.output_bias},
                         {"mlp_bias", options.mlp_bias},
                         {"attention_scale", Maybe(options.attention_scale)},
                         {"attention_soft_cap", Maybe(options.attention_soft_cap)},
                         {"logit_soft_cap", Maybe(options.logit_soft_cap)},
                         {"windows", windows},
                         {"num_nextn_predict_layers", options.num_nextn_predict_layers},
                         {"expert_layers", experts},
                         {"num_experts", rule.num_experts},
                         {"num_experts_per_tok", rule.num_experts_per_tok},
                         {"norm_topk_prob", rule.norm_topk_prob},
                         {"routed_scaling_factor", rule.routed_scaling_factor},
                         {"n_group", rule.n_group},
                         {"topk_group", rule.topk_group},
                         {"expert_size", options.experts.intermediate_size},
                         {"shared_expert_size", options.experts.shared_intermediate_size}};
  if (options.latent.has_value()) {
    json["latent"] = {{"q_lora_rank", options.latent->q_lora_rank},
                      {"kv_lora_rank", options.latent->kv_lora_rank},
                      {"qk_nope_head_dim", options.latent->qk_nope_head_dim},
                      {"qk_rope_head_dim", options.latent->qk_rope_head_dim},
                      {"v_head_dim", options.latent->v_head_dim},
                      {"rope_interleave", options.latent->rope_interleave}};
  }
  return json;
}

nlohmann::json Resolved(const nlohmann::json& text) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(text.dump());
  if (!config.ok()) {
    return {{"error", config.status().ToString()},
            {"field", std::string(FieldPath(config.status()).value_or(""))}};
  }
  nlohmann::json json = {{"vocab_size", config->vocab_size},
                         {"hidden_size", config->hidden_size},
                         {"intermediate_size", config->intermediate_size},
                         {"num_hidden_layers", config->num_hidden_layers},
                         {"num_attention_heads", config->num_attention_heads},
                         {"num_key_value_heads", config->num_key_value_heads},
                         {"head_dim", config->head_dim},
                         {"max_position_embeddings", config->max_position_embeddings},
                         {"rms_norm_eps", config->rms_norm_eps},
                         {"initializer_range", config->initializer_range},
                         {"tie_word_embeddings", config->tie_word_embeddings},
                         {"eos_token_ids", config->eos_token_ids},
                         {"rope", ToJson(config->rope)},
                         {"decoder", ToJson(config->decoder, config->num_hidden_layers)}};
  if (config->window_rope.has_value()) json["window_rope"] = ToJson(*config->window_rope);
  if (config->vision.has_value()) json["vision"] = ToJson(*config->vision);
  return {{"config", json}};
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  CLI::App app("Prints what the servers make of config.json");
  bool keys = false;
  std::string configs;
  app.add_flag("--keys", keys, "Print the tables of keys");
  app.add_option("--configs", configs, "JSON file: an array of config.json");
  CLI11_PARSE(app, argc, argv);
  try {
    nlohmann::json printed = keys ? tandem::AllKeys() : nlohmann::json::array();
    if (!configs.empty()) {
      for (const auto& config : nlohmann::json::parse(std::ifstream(configs))) {
        printed.push_back(tandem::Resolved(config));
      }
    }
    std::cout << printed << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
