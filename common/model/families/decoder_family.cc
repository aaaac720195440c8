#include "common/model/families/decoder_family.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/rope_config.h"
#include "common/model/families/expert_options.h"
#include "common/model/families/keys/family_keys.h"
#include "common/model/families/latent_attention_family.h"
#include "common/model/families/parameter_list.h"
#include "common/model/parameters/shard.h"
#include "common/model/vision/vision_parameters.h"

namespace tandem {
namespace {

constexpr int64_t kFloatBytes = 4;

// Names of the network and of the stacked experts below "model.layers.<i>.", as `transformers`
// holds them in memory, and in files that it writes with `save_original_format=False`.
constexpr const char* kStackedNetwork = "mlp.";
constexpr const char* kStackedGateUp = "experts.gate_up_proj";

// Names of the tensors of DecoderOptions::fused_projections, the first below "self_attn." and the
// second below the layer.
constexpr const char* kFusedQkv = "qkv_proj.weight";
constexpr const char* kFusedGateUp = "mlp.gate_up_proj.weight";

// Reads the width of a head.
absl::Status ReadHeads(const ConfigFields& fields, ModelConfig& config) {
  TANDEM_ASSIGN_OR_RETURN(const auto head_dim, fields.MaybeSize("head_dim"));
  if (!head_dim.has_value() && config.hidden_size % config.num_attention_heads != 0) {
    return InvalidField(fields.Path("hidden_size"),
                        "must be a multiple of num_attention_heads when head_dim is not given");
  }
  config.head_dim = head_dim.value_or(config.hidden_size / config.num_attention_heads);
  if (config.head_dim % 2 != 0) {
    return InvalidField(fields.Path("head_dim"), "must be even for rotary embeddings");
  }
  return absl::OkStatus();
}

void AddGroupedQueryAttention(const ModelConfig& config, const std::string& prefix,
                              ParameterList& list) {
  const DecoderOptions& options = config.decoder;
  list.ColumnParallel(prefix + "q_proj", config.query_size(), options.qkv_bias);
  list.ColumnParallel(prefix + "k_proj", config.key_value_size(), options.qkv_bias);
  list.ColumnParallel(prefix + "v_proj", config.key_value_size(), options.qkv_bias);
  list.RowParallel(prefix + "o_proj", config.query_size(), options.output_bias);
  if (options.qk_norm == QkNorm::kEachHead) {
    list.Norm(prefix + "q_norm", config.head_dim);
    list.Norm(prefix + "k_norm", config.head_dim);
  } else if (options.qk_norm == QkNorm::kAllHeads) {
    list.Norm(prefix + "q_norm", config.query_size(), /*shard_axis=*/0);
    list.Norm(prefix + "k_norm", config.key_value_size(), /*shard_axis=*/0);
  }
}

// Declares the maps of those names, to a width of `inner` and back.
void AddGatedMlp(const std::string& gate, const std::string& up, const std::string& down,
                 int64_t inner, bool bias, ParameterList& list) {
  list.ColumnParallel(gate, inner, bias);
  list.ColumnParallel(up, inner, bias);
  list.RowParallel(down, inner, bias);
}

void AddGatedMlp(const std::string& prefix, int64_t inner, bool bias, ParameterList& list) {
  AddGatedMlp(prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj", inner, bias, list);
}

void AddExperts(const ModelConfig& config, const std::string& layer, ParameterList& list) {
  const ExpertOptions& experts = config.decoder.experts;
  const ExpertNames& names = config.decoder.expert_names;
  const std::string network = layer + names.network;
  list.Whole(network + "gate", experts.routing.num_experts);
  if (experts.routing.score_correction_bias) {
    list.Buffer(network + "gate.e_score_correction_bias", experts.routing.num_experts);
  }
  for (int64_t i = 0; i < experts.routing.num_experts; ++i) {
    const std::string expert = absl::StrCat(network, "experts.", i, ".");
    list.StartExpert({.index = i, .count = experts.routing.num_experts});
    AddGatedMlp(expert + names.gate, expert + names.up, expert + names.down,
                experts.intermediate_size, /*bias=*/false, list);
  }
  list.EndExperts();
  if (experts.shared_intermediate_size == 0) return;
  AddGatedMlp(network + names.shared, experts.shared_intermediate_size, /*bias=*/false, list);
  if (experts.shared_gate) list.Whole(network + "shared_expert_gate", 1);
}

// Adds the tensors of DecoderOptions::fused_projections of a layer.
void AddFusedProjections(const ModelConfig& config, const std::string& layer,
                         std::vector<StackedTensor>& stacks) {
  const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
  const int64_t queries = config.query_size(), keys = config.key_value_size();
  const int64_t inner = config.intermediate_size;
  stacks.push_back({.name = attention + kFusedQkv,
                    .shape = {queries + 2 * keys, config.hidden_size},
                    .parameters = {{attention + "q_proj.weight", queries},
                                   {attention + "k_proj.weight", keys},
                                   {attention + "v_proj.weight", keys}},
                    .is_exported = true});
  stacks.push_back(
      {.name = layer + kFusedGateUp,
       .shape = {2 * inner, config.hidden_size},
       .parameters = {{mlp + "gate_proj.weight", inner}, {mlp + "up_proj.weight", inner}},
       .is_exported = true});
}

int64_t NumExpertLayers(const ModelConfig& config) {
  int64_t count = 0;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    if (config.decoder.experts.OfLayer(i)) ++count;
  }
  return count;
}

// Returns the values per token at the widest point of a layer's experts, in one of `shard_count`
// shards: of each expert of the token its input, gate and up, their product and its output; the
// same of the shared expert; the sum; the router's logits, scores and order.
int64_t ExpertActivations(const ModelConfig& config, int64_t shard_count,
                          bool whole_experts = false) {
  const ExpertOptions& experts = config.decoder.experts;
  const int64_t expert_shards = whole_experts ? 1 : shard_count;
  const int64_t widths =
      experts.routing.num_experts_per_tok * experts.intermediate_size / expert_shards +
      experts.shared_intermediate_size / shard_count;
  return 2 * experts.routing.num_experts_per_tok * config.hidden_size + 3 * widths +
         2 * config.hidden_size + 4 * experts.routing.num_experts;
}

}  // namespace

std::vector<ConfigSection> DecoderFamily::Keys() const {
  return {{.object = "", .keys = keys_}, {.object = "rope_parameters", .keys = RopeKeys()}};
}

absl::Status DecoderFamily::ReadConfig(const ConfigFields& all, ModelConfig& config) const {
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json obeyed, ObeyedKeys(all, keys_));
  const ConfigFields fields(obeyed, all.path());
  TANDEM_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size"));
  TANDEM_ASSIGN_OR_RETURN(config.hidden_size, fields.Size("hidden_size"));
  TANDEM_ASSIGN_OR_RETURN(config.intermediate_size, fields.Size("intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(config.num_hidden_layers, fields.Size("num_hidden_layers"));
  TANDEM_ASSIGN_OR_RETURN(config.num_attention_heads, fields.Size("num_attention_heads"));
  TANDEM_ASSIGN_OR_RETURN(const auto key_value_heads, fields.MaybeSize("num_key_value_heads"));
  config.num_key_value_heads = key_value_heads.value_or(config.num_attention_heads);
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return InvalidField(
        fields.Path("num_key_value_heads"),
        absl::StrCat("must divide num_attention_heads (", config.num_attention_heads, ")"));
  }
  TANDEM_ASSIGN_OR_RETURN(config.decoder, options_(fields, config.num_hidden_layers));
  TANDEM_RETURN_IF_ERROR(config.decoder.latent.has_value() ? ReadLatentHeads(fields, config)
                                                           : ReadHeads(fields, config));
  TANDEM_ASSIGN_OR_RETURN(config.max_position_embeddings, fields.Size("max_position_embeddings"));
  TANDEM_ASSIGN_OR_RETURN(config.rms_norm_eps, fields.Positive("rms_norm_eps"));
  TANDEM_ASSIGN_OR_RETURN(config.initializer_range, fields.Positive("initializer_range"));
  TANDEM_ASSIGN_OR_RETURN(config.tie_word_embeddings, fields.Bool("tie_word_embeddings"));
  std::set<int64_t> eos;
  TANDEM_RETURN_IF_ERROR(fields.AppendIds("eos_token_id", eos));
  config.eos_token_ids.assign(eos.begin(), eos.end());
  const RopeModel rope_model = {.max_position_embeddings = config.max_position_embeddings,
                                .head_dim = config.head_dim,
                                .partial_rotary = classes_.partial_rotary};
  if (classes_.layer_ropes) {
    TANDEM_ASSIGN_OR_RETURN(const LayerRopes ropes, ReadLayerRopes(fields, rope_model));
    config.rope = ropes.full;
    config.window_rope = ropes.sliding;
  } else {
    TANDEM_ASSIGN_OR_RETURN(config.rope, ReadRopeConfig(fields, rope_model));
  }
  if (!config.rope.mrope_section.empty() && !config.decoder.mrope) {
    return fields.NotSupported(
        "rope_parameters.mrope_section",
        absl::StrCat("a rotation by three positions (M-RoPE) in a model of type ",
                     config.model_type));
  }
  return absl::OkStatus();
}

std::vector<ParameterSpec> DecoderFamily::Parameters(const ModelConfig& config) const {
  const bool ones = config.decoder.norm_offset == 0;
  ParameterList list(config.hidden_size, ones ? Init::kOnes : Init::kZeros);
  list.Embedding(config.vocab_size);
  if (config.vision.has_value()) {
    list.StartBlock(kVisionBlock);
    AddVisionTower(*config.vision, config.hidden_size, list);
  }
  const LayerNormNames norms(config.decoder);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    list.StartBlock(config.FirstLayerBlock() + i);
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    config.decoder.latent.has_value()
        ? AddLatentAttention(config, prefix + "self_attn.", list)
        : AddGroupedQueryAttention(config, prefix + "self_attn.", list);
    config.decoder.experts.OfLayer(i)
        ? AddExperts(config, prefix, list)
        : AddGatedMlp(prefix + "mlp.", config.intermediate_size, config.decoder.mlp_bias, list);
    for (const std::string& norm :
         {norms.attention_input, norms.attention_output, norms.mlp_input, norms.mlp_output}) {
      if (!norm.empty()) list.Norm(prefix + norm, config.hidden_size);
    }
  }
  list.StartBlock(config.LastBlock());
  list.Norm("model.norm", config.hidden_size);
  return list.Take();
}

std::string DecoderFamily::ParameterName(absl::string_view tensor) const {
  const bool lacks_prefix = absl::StartsWith(tensor, "layers.") ||
                            tensor == "embed_tokens.weight" || tensor == "norm.weight";
  return lacks_prefix ? absl::StrCat("model.", tensor) : std::string(tensor);
}

std::vector<WeightFileSize> DecoderFamily::WeightFileSizes(const ModelConfig& config) const {
  const std::string attention = "model.layers.0.self_attn.";
  std::vector<WeightFileSize> sizes = {{kEmbeddingName, 0, config.vocab_size, "vocab_size"},
                                       {kEmbeddingName, 1, config.hidden_size, "hidden_size"}};
  if (config.decoder.latent.has_value()) {
    for (WeightFileSize& size : LatentFileSizes(config, attention)) sizes.push_back(size);
  } else if (config.decoder.fused_projections) {
    sizes.push_back({attention + kFusedQkv, 0, config.query_size() + 2 * config.key_value_size(),
                     "num_attention_heads",
                     "and twice num_key_value_heads, together times head_dim, "});
  } else {
    sizes.push_back({attention + "q_proj.weight", 0, config.query_size(), "num_attention_heads",
                     "times head_dim "});
    sizes.push_back({attention + "k_proj.weight", 0, config.key_value_size(), "num_key_value_heads",
                     "times head_dim "});
  }
  const ExpertOptions& experts = config.decoder.experts;
  const ExpertNames& names = config.decoder.expert_names;
  bool has_dense = false, has_experts = false;
  for (int64_t i = 0; i < config.num_hidden_layers && !(has_dense && has_experts); ++i) {
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    if (!experts.OfLayer(i) && !std::exchange(has_dense, true)) {
      sizes.push_back(config.decoder.fused_projections
                          ? WeightFileSize{prefix + kFusedGateUp, 0, 2 * config.intermediate_size,
                                           "intermediate_size", "times 2 "}
                          : WeightFileSize{prefix + "mlp.gate_proj.weight", 0,
                                           config.intermediate_size, "intermediate_size"});
    }
    if (experts.OfLayer(i) && !std::exchange(has_experts, true)) {
      const std::string network = prefix + names.network;
      const std::string stack = prefix + kStackedNetwork;
      const int64_t num_experts = experts.routing.num_experts, inner = experts.intermediate_size;
      const std::string inner_field = names.intermediate_size;
      sizes.push_back({.tensor = network + "gate.weight",
                       .size = num_experts,
                       .field = names.num_experts,
                       .instead = {{stack + "gate.weight", 0, num_experts, names.num_experts}}});
      sizes.push_back(
          {.tensor = absl::StrCat(network, "experts.0.", names.gate, ".weight"),
           .size = inner,
           .field = inner_field,
           .instead = {{stack + kStackedGateUp, 1, 2 * inner, inner_field, "times 2 ", 3}}});
      if (experts.shared_intermediate_size > 0) {
        sizes.push_back({network + names.shared + "gate_proj.weight", 0,
                         experts.shared_intermediate_size, names.shared_intermediate_size,
                         names.shared_intermediate_size == kNumSharedExperts
                             ? "times moe_intermediate_size "
                             : ""});
      }
    }
  }
  for (WeightFileSize& size : sizes) {
    size.field = config.text_path + size.field;
    for (WeightFileSize& other : size.instead) other.field = config.text_path + other.field;
  }
  return sizes;
}

std::vector<StackedTensor> DecoderFamily::StackedTensors(const ModelConfig& config) const {
  const ExpertOptions& experts = config.decoder.experts;
  const ExpertNames& names = config.decoder.expert_names;
  const int64_t count = experts.routing.num_experts, inner = experts.intermediate_size;
  std::vector<StackedTensor> stacks;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    if (config.decoder.fused_projections) AddFusedProjections(config, prefix, stacks);
    if (!experts.OfLayer(layer)) continue;
    const std::string network = prefix + names.network, stack = prefix + kStackedNetwork;
    StackedTensor gate_up = {stack + kStackedGateUp, {count, 2 * inner, config.hidden_size}, {}};
    StackedTensor down = {stack + "experts.down_proj", {count, config.hidden_size, inner}, {}};
    for (int64_t i = 0; i < count; ++i) {
      const std::string expert = absl::StrCat(network, "experts.", i, ".");
      gate_up.parameters.push_back({absl::StrCat(expert, names.gate, ".weight"), inner});
      gate_up.parameters.push_back({absl::StrCat(expert, names.up, ".weight"), inner});
      down.parameters.push_back({absl::StrCat(expert, names.down, ".weight"), config.hidden_size});
    }
    stacks.push_back(std::move(gate_up));
    stacks.push_back(std::move(down));
    if (stack != network) {
      stacks.push_back(
          {stack + "gate.weight", {count, config.hidden_size}, {{network + "gate.weight", count}}});
    }
  }
  return stacks;
}

absl::Status DecoderFamily::CheckShards(const ModelConfig& config, int64_t shard_count,
                                        bool whole_experts, absl::string_view field) const {
  // Whole heads: that their rows divide is not enough.
  const ExpertOptions& experts = config.decoder.experts;
  const int64_t num_expert_layers = NumExpertLayers(config);
  std::vector<std::pair<std::string, int64_t>> fields = {
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads}};
  if (num_expert_layers < config.num_hidden_layers) {
    fields.emplace_back("intermediate_size", config.intermediate_size);
  }
  if (num_expert_layers > 0) {
    if (!whole_experts) {
      fields.emplace_back(config.decoder.expert_names.intermediate_size, experts.intermediate_size);
    }
    fields.emplace_back(config.decoder.expert_names.shared_intermediate_size,
                        experts.shared_intermediate_size);
  }
  for (const auto& [name, size] : fields) {
    if (size % shard_count != 0) {
      return InvalidField(field, absl::StrCat(shard_count, " does not divide config.json.",
                                              config.text_path, name, ", which is ", size));
    }
  }
  const Shard last = {.index = shard_count - 1, .count = shard_count};
  if (last.Size(config.vocab_size) < 1) {
    return InvalidField(
        field,
        absl::StrCat("config.json.", config.text_path, "vocab_size, which is ", config.vocab_size,
                     ", leaves the last of ", shard_count, " shards without a row"));
  }
  return absl::OkStatus();
}

absl::Status DecoderFamily::CheckExpertShards(const ModelConfig& config, int64_t shard_count,
                                              absl::string_view field) const {
  if (shard_count == 1) return absl::OkStatus();
  if (NumExpertLayers(config) == 0) {
    return InvalidField(field, absl::StrCat(shard_count, " ranks cannot divide the experts of a ",
                                            config.model_type, " model, which has none"));
  }
  const int64_t num_experts = config.decoder.experts.routing.num_experts;
  if (num_experts % shard_count == 0) return absl::OkStatus();
  return InvalidField(
      field, absl::StrCat(shard_count, " does not divide config.json.", config.text_path,
                          config.decoder.expert_names.num_experts, ", which is ", num_experts));
}

std::vector<LayerCache> DecoderFamily::CacheLayout(const ModelConfig& config,
                                                   int64_t shard_count) const {
  if (config.decoder.latent.has_value()) return LatentCacheLayout(config);
  std::vector<LayerCache> layers;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers.push_back({.heads = config.num_key_value_heads / shard_count,
                      .head_dim = config.head_dim,
                      .window = config.decoder.windows.OfLayer(i)});
  }
  return layers;
}

bool DecoderFamily::KeepsTensor(const ModelConfig& config, absl::string_view name) const {
  for (int64_t i = 0; i < config.decoder.num_nextn_predict_layers; ++i) {
    const std::string prefix = absl::StrCat("model.layers.", config.num_hidden_layers + i, ".");
    if (absl::StartsWith(name, prefix)) return true;
  }
  return false;
}

// The residual and its norm, then the inputs and outputs of either the attention or the MLP. A
// shard has its heads and columns of these, and what all shards bring to a sum. A norm behind the
// maps has its input and output beside theirs, and the sum with the residual.
int64_t DecoderFamily::InferenceActivations(const ModelConfig& config, int64_t shard_count,
                                            bool whole_experts) const {
  const bool latent = config.decoder.latent.has_value();
  const int64_t attention =
      latent ? LatentInferenceActivations(config, shard_count)
             : (3 * config.query_size() + 3 * config.key_value_size()) / shard_count;
  const int64_t gathered = shard_count > 1 ? (shard_count + 1) * config.hidden_size : 0;
  const int64_t residuals = 2 + config.decoder.pre_norm + 2 * config.decoder.post_norm;
  const int64_t num_expert_layers = NumExpertLayers(config);
  int64_t widest = attention;
  if (num_expert_layers < config.num_hidden_layers) {
    widest = std::max(widest, 3 * config.intermediate_size / shard_count);
  }
  if (num_expert_layers > 0) {
    widest = std::max(widest, ExpertActivations(config, shard_count, whole_experts));
  }
  return residuals * config.hidden_size + gathered + widest;
}

// Norms with their inputs; queries, keys and values before and after rotation and repetition; the
// attention's output; gate, up and their product. SmolLM2-135M takes 0.87 of it; as much in bf16,
// where norms and rotation stay float32. A shard keeps the gathered inputs of its maps whole, and
// of a norm over heads of several shards also its result without the weight. Experts keep the rows
// that they read, gate and up, their product and their output.
int64_t DecoderFamily::TrainingActivationBytes(const ModelConfig& config, int64_t layer,
                                               int64_t shard_count) const {
  const int64_t whole = 2 * config.hidden_size;
  const bool has_experts = config.decoder.experts.OfLayer(layer);
  const int64_t dense = has_experts ? 0 : 4 * config.intermediate_size;
  const int64_t experts = has_experts ? ExpertActivations(config, shard_count) : 0;
  if (config.decoder.latent.has_value()) {
    const int64_t cut = 3 * config.hidden_size + dense;
    return (whole + cut / shard_count + experts + LatentTrainingActivations(config, shard_count)) *
           kFloatBytes;
  }
  const int64_t heads = config.query_size() + config.key_value_size();
  const int64_t shared_norms =
      shard_count > 1 && config.decoder.qk_norm == QkNorm::kAllHeads ? heads : 0;
  const int64_t norms = 1 + 2 * (config.decoder.pre_norm + config.decoder.post_norm);
  const int64_t cut =
      norms * config.hidden_size + 2 * config.query_size() + 2 * heads + shared_norms + dense;
  return (whole + cut / shard_count + experts) * kFloatBytes;
}

}  // namespace tandem
