// The architecture of a model, read from a Hugging Face `config.json`.
#ifndef TANDEM_COMMON_MODEL_CONFIG_MODEL_CONFIG_H_
#define TANDEM_COMMON_MODEL_CONFIG_MODEL_CONFIG_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/kernels/attention_window.h"
#include "common/kernels/gate_activation.h"
#include "common/model/passes/layer_cache.h"
#include "common/model/vision/vision_config.h"

namespace tandem {

// Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extension.
struct RopeConfig {
  enum class Type {
    kDefault,
    kLinear,    // positions divided by `factor`
    kLlama3,    // low frequencies divided, high ones kept (Llama 3.1)
    kYarn,      // https://arxiv.org/abs/2309.00071
    kLongRope,  // every frequency divided by a number of its own, https://arxiv.org/abs/2402.13753
  };
  Type type = Type::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  // kLlama3, kYarn, kLongRope: the context length of pre-training.
  double original_max_position_embeddings = 0.0;
  // kLlama3.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // kYarn.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  std::optional<double> mscale = std::nullopt;
  std::optional<double> mscale_all_dim = std::nullopt;
  // kYarn, kLongRope.
  std::optional<double> attention_factor = std::nullopt;
  // kLongRope: a divisor for each frequency.
  std::vector<double> frequency_divisors = {};
  // The number of a head's columns that are rotated, the first ones; std::nullopt: all.
  std::optional<int64_t> rotary_dim = std::nullopt;
  // The longest sequence that the model rotates so, if it rotates longer ones otherwise.
  std::optional<int64_t> longest_sequence = std::nullopt;
  // M-RoPE (https://arxiv.org/abs/2409.12191): the numbers of frequencies that a token's positions
  // in time, height and width turn, in this order, head_dim / 2 together. Empty: a token has one
  // position.
  std::vector<int64_t> mrope_section = {};
};

// The RMSNorm of queries and keys, before the rotation.
enum class QkNorm {
  kNone,
  kEachHead,  // of each head by itself
  kAllHeads,  // of all query heads of a token together, and of all key heads
};

// The windows of a model's layers (attention_window.h): some have one, and it is the same for all.
struct LayerWindows {
  int64_t window = kNoWindow;
  // The first layer that has it; with `layers`, whether each one has it.
  int64_t first_layer = 0;
  std::vector<bool> layers = {};

  int64_t OfLayer(int64_t layer) const {
    const bool has_window =
        layers.empty() ? layer >= first_layer : layers[static_cast<size_t>(layer)];
    return has_window ? window : kNoWindow;
  }
};

// Multi-head latent attention (families/latent_attention.h). Names are those of config.json.
struct LatentAttentionOptions {
  int64_t q_lora_rank = 0;  // 0: queries have no latent
  int64_t kv_lora_rank = 0;
  // The widths of a head: queries and keys without and with rotation, and values.
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool rope_interleave = true;  // the rotated pairs are neighbours
  bool latent_bias = false;     // of the maps to the latents

  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  // Width of a token in the cache: the latent and the rotated part of the key.
  int64_t cached_dim() const { return kv_lora_rank + qk_rope_head_dim; }
};

// The function that turns a router's logits into the scores of the experts.
enum class RouterScore {
  kSoftmax,  // over all experts
  kSigmoid,  // of each expert by itself
};

// How tokens choose their experts (families/router.h).
struct RoutingRule {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 0;
  RouterScore score = RouterScore::kSoftmax;
  // Whether the weights of a token's experts are divided by their sum.
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1.0;  // of the weights
  // A token chooses among the experts of its best `topk_group` of `n_group` equal groups.
  int64_t n_group = 1;
  int64_t topk_group = 1;
  // Whether a bias by expert, which no gradient changes, is added to the scores that choose.
  bool score_correction_bias = false;
};

// The layers whose feed-forward network consists of experts (families/expert_mlp.h).
struct ExpertOptions {
  RoutingRule routing = {};
  int64_t intermediate_size = 0;  // of one expert
  // Width of the expert that every token takes; 0: there is none.
  int64_t shared_intermediate_size = 0;
  bool shared_gate = false;  // whether the sigmoid of a map weighs its output
  // The layers from `first_layer` on have experts, of these every `step`-th of the model, but for
  // `dense_layers`.
  int64_t first_layer = 0;
  int64_t step = 1;
  std::vector<int64_t> dense_layers = {};

  bool OfLayer(int64_t layer) const {
    return routing.num_experts > 0 && layer >= first_layer && (layer + 1) % step == 0 &&
           std::ranges::find(dense_layers, layer) == dense_layers.end();
  }
  // Returns the number of layers with experts among the first `layers` layers.
  int64_t LayersBefore(int64_t layers) const {
    int64_t count = 0;
    for (int64_t i = 0; i < layers; ++i) count += OfLayer(i) ? 1 : 0;
    return count;
  }
};

// Hugging Face's names of the experts' parameters, below "model.layers.<i>.".
struct ExpertNames {
  std::string network = "mlp.";
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";  // of one expert
  std::string shared = "shared_expert.";
  // Keys of config.json.
  std::string num_experts = "num_experts";
  std::string intermediate_size = "moe_intermediate_size";
  std::string shared_intermediate_size = "shared_expert_intermediate_size";
};

// How the decoder (families/decoder_family.h) of one family differs from another's.
struct DecoderOptions {
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  // Whether a layer normalises the inputs of attention and MLP, and whether their outputs, before
  // it adds them to the residual.
  bool pre_norm = true;
  bool post_norm = false;
  double norm_offset = 0;  // what every norm adds to its weight
  kernels::GateActivation activation = kernels::GateActivation::kSilu;  // of the MLP
  bool scale_embeddings = false;  // whether embeddings are multiplied by sqrt(hidden_size)
  std::optional<double> attention_scale = std::nullopt;  // std::nullopt: 1 / sqrt(head_dim)
  // Soft caps x -> cap tanh(x / cap) of the scores of attention, and of the logits.
  std::optional<double> attention_soft_cap = std::nullopt;
  std::optional<double> logit_soft_cap = std::nullopt;
  LayerWindows windows = {};
  // In place of grouped-query attention.
  std::optional<LatentAttentionOptions> latent = std::nullopt;
  // Layers for multi-token prediction behind the others, which a checkpoint may have. Their tensors
  // are kept and not used.
  int64_t num_nextn_predict_layers = 0;
  ExpertOptions experts = {};
  ExpertNames expert_names = {};
  // Whether weight files hold the maps of queries, keys and values as one tensor, `qkv_proj`, and
  // those of gate and up as one, `gate_up_proj`.
  bool fused_projections = false;
  bool mrope = false;  // whether a token has three positions (RopeConfig::mrope_section)
};

struct ModelConfig {
  std::string model_type;  // names the family (family.h)
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  RopeConfig rope;
  std::optional<RopeConfig> window_rope;  // of layers with a window, if it is another
  bool tie_word_embeddings = false;
  DecoderOptions decoder;
  // The vision tower; nullopt: the model reads tokens alone.
  std::optional<VisionConfig> vision;
  double initializer_range = 0.02;
  // Union of config.json and generation_config.json, ascending; the class's where there is neither.
  std::vector<int64_t> eos_token_ids;
  // The object of config.json that has the sizes of the text model: "", or "text_config."
  std::string text_path;
  // The text of config.json; an export writes its unknown keys back.
  std::string raw_json;

  // The longest sequence that the positions and their rotation allow, at most `limit`.
  int64_t LongestSequence(int64_t limit) const {
    if (max_position_embeddings > 0) limit = std::min(limit, max_position_embeddings);
    if (window_rope) limit = std::min(limit, window_rope->longest_sequence.value_or(limit));
    return std::min(limit, rope.longest_sequence.value_or(limit));
  }
  // The blocks of a pass (Backbone::RunBlock): the embedding, the vision tower if there is one, the
  // layers, and at last the final norm with the head.
  int64_t FirstLayerBlock() const { return vision.has_value() ? 2 : 1; }
  int64_t LastBlock() const { return FirstLayerBlock() + num_hidden_layers; }
  // The record of a token's routing in a cache; without layers for a model without experts.
  RoutingCache RoutingLayout() const {
    const RoutingRule& rule = decoder.experts.routing;
    return {.layers = decoder.experts.LayersBefore(num_hidden_layers),
            .num_experts = rule.num_experts,
            .experts_per_token = rule.num_experts_per_tok};
  }
  // Width of a token's queries, and of its keys or its values.
  int64_t query_size() const { return num_attention_heads * head_dim; }
  int64_t key_value_size() const { return num_key_value_heads * head_dim; }
};

// Parses the text of a config.json; `generation_json` may be empty. It is read as the class of
// `transformers` reads it, with the defaults of that class for keys that are missing, or refused
// (families/family_keys.h has each key).
// INVALID_ARGUMENT with the field's path ("config.json.hidden_size") for what is wrong,
// UNIMPLEMENTED with the path for what is valid but not supported: another family, and keys that
// would change what the model computes (Family::ReadConfig).
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json,
                                             absl::string_view generation_json = "");

// Reads config.json and, if present, generation_config.json. NOT_FOUND without a config.json.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& directory);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_MODEL_CONFIG_H_
