#include "common/model/decoder_parameters.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace tandem {

std::vector<ParameterSpec> DenseDecoderParameters(const ModelConfig& config,
                                                  const DecoderOptions& options) {
  std::vector<ParameterSpec> specs;
  const int64_t hidden = config.hidden_size;
  int64_t block = 0;
  // Cut by output: the bias is cut with the rows that it belongs to.
  const auto column_parallel = [&](const std::string& name, int64_t out, bool bias) {
    specs.push_back(
        {.name = name + ".weight", .shape = {out, hidden}, .shard_axis = 0, .block = block});
    if (bias) {
      specs.push_back({.name = name + ".bias",
                       .shape = {out},
                       .init = Init::kZeros,
                       .shard_axis = 0,
                       .block = block});
    }
  };
  // Cut by input: the bias is added once, after the partial sums.
  const auto row_parallel = [&](const std::string& name, int64_t in, bool bias) {
    specs.push_back(
        {.name = name + ".weight", .shape = {hidden, in}, .shard_axis = 1, .block = block});
    if (bias) {
      specs.push_back(
          {.name = name + ".bias", .shape = {hidden}, .init = Init::kZeros, .block = block});
    }
  };
  const auto norm = [&](const std::string& name, int64_t width) {
    specs.push_back(
        {.name = name + ".weight", .shape = {width}, .init = Init::kOnes, .block = block});
  };

  specs.push_back({.name = kEmbeddingName, .shape = {config.vocab_size, hidden}, .shard_axis = 0});
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    block = i + 1;
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    column_parallel(attention + "q_proj", config.query_size(), options.qkv_bias);
    column_parallel(attention + "k_proj", config.key_value_size(), options.qkv_bias);
    column_parallel(attention + "v_proj", config.key_value_size(), options.qkv_bias);
    row_parallel(attention + "o_proj", config.query_size(), options.output_bias);
    if (options.qk_norm) {
      norm(attention + "q_norm", config.head_dim);
      norm(attention + "k_norm", config.head_dim);
    }
    column_parallel(mlp + "gate_proj", config.intermediate_size, options.mlp_bias);
    column_parallel(mlp + "up_proj", config.intermediate_size, options.mlp_bias);
    row_parallel(mlp + "down_proj", config.intermediate_size, options.mlp_bias);
    norm(prefix + "input_layernorm", hidden);
    norm(prefix + "post_attention_layernorm", hidden);
  }
  block = LastBlock(config.num_hidden_layers);
  norm("model.norm", hidden);
  return specs;
}

absl::Status CheckDecoderShards(const ModelConfig& config, int64_t shard_count,
                                absl::string_view field) {
  // Whole heads: that their rows divide is not enough.
  const std::pair<const char*, int64_t> fields[] = {
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads},
      {"intermediate_size", config.intermediate_size},
      {"vocab_size", config.vocab_size}};
  for (const auto& [name, size] : fields) {
    if (size % shard_count != 0) {
      return InvalidField(field, absl::StrCat(shard_count, " does not divide config.json.", name,
                                              ", which is ", size));
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem
