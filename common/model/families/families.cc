// The table of families. Each row of it has a row in README.md, a name in
// clients/python/tandem/models/importing.py and a case in tests/parity/test_transformers_parity.py,
// which tests/parity/test_families.py compares.
#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/rope_config.h"
#include "common/model/families/decoder_family.h"
#include "common/model/families/expert_options.h"
#include "common/model/families/keys/family_keys.h"
#include "common/model/families/latent_attention_family.h"
#include "common/model/families/layer_windows.h"
#include "common/model/families/vision_language_family.h"
#include "common/model/family.h"
#include "common/model/vision/read_vision_config.h"

namespace tandem {
namespace {

using Options = DecoderOptions;

// Reads the bias that covers queries, keys, values and the output projection.
absl::Status ReadAttentionBias(const ConfigFields& fields, Options& options) {
  TANDEM_ASSIGN_OR_RETURN(options.qkv_bias, fields.Bool("attention_bias"));
  options.output_bias = options.qkv_bias;
  return absl::OkStatus();
}

// Llama, and SmolLM2.
absl::StatusOr<Options> LlamaOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options;
  TANDEM_ASSIGN_OR_RETURN(options.windows, NoWindows(fields, num_layers));
  TANDEM_RETURN_IF_ERROR(ReadAttentionBias(fields, options));
  TANDEM_ASSIGN_OR_RETURN(options.mlp_bias, fields.Bool("mlp_bias"));
  return options;
}

// Mistral: no biases.
absl::StatusOr<Options> MistralOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options;
  TANDEM_ASSIGN_OR_RETURN(options.windows, MistralWindows(fields, num_layers));
  return options;
}

// Qwen2 and Qwen2.5: queries, keys and values always have a bias, no other map does.
absl::StatusOr<Options> Qwen2Options(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.qkv_bias = true};
  TANDEM_ASSIGN_OR_RETURN(options.windows, QwenWindows(fields, num_layers));
  return options;
}

// Qwen3: queries and keys are normalised head by head.
absl::StatusOr<Options> Qwen3Options(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.qk_norm = QkNorm::kEachHead};
  TANDEM_ASSIGN_OR_RETURN(options.windows, QwenWindows(fields, num_layers));
  TANDEM_RETURN_IF_ERROR(ReadAttentionBias(fields, options));
  return options;
}

// OLMo 2 (https://arxiv.org/abs/2501.00656): norms behind attention and MLP, and of all queries and
// all keys of a token.
absl::StatusOr<Options> Olmo2Options(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.qk_norm = QkNorm::kAllHeads, .pre_norm = false, .post_norm = true};
  TANDEM_ASSIGN_OR_RETURN(options.windows, NoWindows(fields, num_layers));
  TANDEM_RETURN_IF_ERROR(ReadAttentionBias(fields, options));
  return options;
}

// DeepSeek-V3 (https://arxiv.org/abs/2412.19437): latent attention, and experts behind the first
// layers.
absl::StatusOr<Options> DeepseekV3Options(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.expert_names = {.shared = "shared_experts.",
                                      .num_experts = NumExpertsKey(fields, "n_routed_experts"),
                                      .shared_intermediate_size = kNumSharedExperts}};
  TANDEM_ASSIGN_OR_RETURN(options.windows, NoWindows(fields, num_layers));
  TANDEM_ASSIGN_OR_RETURN(options.latent, ReadLatentAttention(fields));
  options.output_bias = options.latent->latent_bias;
  TANDEM_ASSIGN_OR_RETURN(const int64_t dense, fields.Count("first_k_dense_replace"));
  if (dense < num_layers) {
    TANDEM_ASSIGN_OR_RETURN(options.experts, DeepseekV3Experts(fields));
  }
  TANDEM_ASSIGN_OR_RETURN(options.num_nextn_predict_layers,
                          fields.Count("num_nextn_predict_layers"));
  return options;
}

// Reads the options that Gemma 2 and Gemma 3 share: norms before and behind attention and MLP, with
// 1 added to their weights, a scale of scores of their own, scaled embeddings.
absl::StatusOr<Options> GemmaOptions(const ConfigFields& fields) {
  Options options = {.post_norm = true,
                     .norm_offset = 1,
                     .activation = kernels::GateActivation::kGeluTanh,
                     .scale_embeddings = true};
  TANDEM_RETURN_IF_ERROR(ReadAttentionBias(fields, options));
  TANDEM_ASSIGN_OR_RETURN(const double width, fields.Positive("query_pre_attn_scalar"));
  options.attention_scale = 1 / std::sqrt(width);
  TANDEM_ASSIGN_OR_RETURN(options.logit_soft_cap, fields.MaybePositive("final_logit_softcapping"));
  return options;
}

// Gemma 2 (https://arxiv.org/abs/2408.00118): windows in every other layer, soft caps of scores and
// logits.
absl::StatusOr<Options> Gemma2Options(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(Options options, GemmaOptions(fields));
  TANDEM_ASSIGN_OR_RETURN(options.windows, Gemma2Windows(fields, num_layers));
  TANDEM_ASSIGN_OR_RETURN(options.attention_soft_cap,
                          fields.MaybePositive("attn_logit_softcapping"));
  return options;
}

// Gemma 3 (https://arxiv.org/abs/2503.19786), the language model alone: windows in most layers,
// queries and keys normalised head by head.
absl::StatusOr<Options> Gemma3Options(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(Options options, GemmaOptions(fields));
  options.qk_norm = QkNorm::kEachHead;
  TANDEM_ASSIGN_OR_RETURN(options.windows, Gemma3Windows(fields, num_layers));
  return options;
}

// Mixtral (https://arxiv.org/abs/2401.04088): experts in every layer.
absl::StatusOr<Options> MixtralOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options = {
      .expert_names = {.network = "block_sparse_moe.",
                       .gate = "w1",
                       .up = "w3",
                       .down = "w2",
                       .num_experts = NumExpertsKey(fields, "num_local_experts", "num_experts"),
                       .intermediate_size = "intermediate_size"}};
  TANDEM_ASSIGN_OR_RETURN(options.windows, MixtralWindows(fields, num_layers));
  TANDEM_ASSIGN_OR_RETURN(options.experts, MixtralExperts(fields));
  return options;
}

// Qwen2-MoE, as Qwen1.5-MoE-A2.7B: experts, and one that every token takes, behind a gate.
absl::StatusOr<Options> Qwen2MoeOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.expert_names = {.num_experts = "num_experts"}};
  TANDEM_ASSIGN_OR_RETURN(options.qkv_bias, fields.Bool("qkv_bias"));
  TANDEM_ASSIGN_OR_RETURN(options.windows, Qwen2MoeWindows(fields, num_layers));
  TANDEM_ASSIGN_OR_RETURN(options.experts, Qwen2MoeExperts(fields));
  return options;
}

// Qwen3-MoE: the attention of Qwen3.
absl::StatusOr<Options> Qwen3MoeOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.qk_norm = QkNorm::kEachHead,
                     .expert_names = {.num_experts = NumExpertsKey(fields, "num_experts")}};
  TANDEM_RETURN_IF_ERROR(ReadAttentionBias(fields, options));
  TANDEM_ASSIGN_OR_RETURN(options.windows, Qwen3MoeWindows(fields, num_layers));
  TANDEM_ASSIGN_OR_RETURN(options.experts, Qwen3MoeExperts(fields));
  return options;
}

// Phi-3 (https://arxiv.org/abs/2404.14219): a Llama in whose files maps of one input are one
// tensor, with a window in all layers or none.
absl::StatusOr<Options> Phi3Options(const ConfigFields& fields, int64_t num_layers) {
  TANDEM_ASSIGN_OR_RETURN(const auto rope, RopeObject(fields));
  if (rope.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(const std::string type, RopeType(*rope));
    if (type != "default" && type != "longrope" && type != "su") {
      return rope->NotSupported(rope->Find("rope_type") != nullptr ? "rope_type" : "type",
                                absl::StrCat("rope type '", type, "' of Phi-3"));
    }
  }
  Options options = {.fused_projections = true};
  TANDEM_ASSIGN_OR_RETURN(options.windows, MixtralWindows(fields, num_layers));
  return options;
}

// Qwen2-VL and Qwen2.5-VL: a Qwen2 whose tokens have three positions.
absl::StatusOr<Options> QwenVlOptions(const ConfigFields& fields, int64_t num_layers) {
  Options options = {.qkv_bias = true, .mrope = true};
  TANDEM_ASSIGN_OR_RETURN(options.windows, NoWindows(fields, num_layers));
  return options;
}

}  // namespace

const std::vector<const Family*>& Families() {
  static const auto* const families = new std::vector<const Family*>{
      new DecoderFamily("llama", "Llama", LlamaKeys(), LlamaOptions),
      new DecoderFamily("mistral", "Mistral", MistralKeys(), MistralOptions),
      new DecoderFamily("qwen2", "Qwen2", Qwen2Keys(), Qwen2Options),
      new DecoderFamily("qwen3", "Qwen3", Qwen3Keys(), Qwen3Options),
      new DecoderFamily("olmo2", "Olmo2", Olmo2Keys(), Olmo2Options,
                        {.has_token_classifier = false}),
      new DecoderFamily("deepseek_v3", "DeepseekV3", DeepseekV3Keys(), DeepseekV3Options),
      new DecoderFamily("gemma2", "Gemma2", Gemma2Keys(), Gemma2Options),
      new DecoderFamily(
          "gemma3_text", "Gemma3", Gemma3Keys(), Gemma3Options,
          {.layer_ropes = true, .has_token_classifier = false, .classifier_prefix = "Gemma3Text"}),
      new DecoderFamily("mixtral", "Mixtral", MixtralKeys(), MixtralOptions),
      new DecoderFamily("qwen2_moe", "Qwen2Moe", Qwen2MoeKeys(), Qwen2MoeOptions),
      new DecoderFamily("qwen3_moe", "Qwen3Moe", Qwen3MoeKeys(), Qwen3MoeOptions),
      new DecoderFamily("phi3", "Phi3", Phi3Keys(), Phi3Options, {.partial_rotary = true}),
      new VisionLanguageFamily("qwen2_vl", "Qwen2VL", QwenVlTextKeys(), QwenVlOptions,
                               Qwen2VlVisionKeys(), ReadQwen2VlVision),
      new VisionLanguageFamily("qwen2_5_vl", "Qwen2_5_VL", QwenVlTextKeys(), QwenVlOptions,
                               Qwen25VlVisionKeys(), ReadQwen25VlVision),
  };
  return *families;
}

absl::StatusOr<const Family*> FindFamily(absl::string_view model_type) {
  std::string known;
  for (const Family* family : Families()) {
    if (model_type == absl::string_view(family->model_type())) return family;
    absl::StrAppend(&known, known.empty() ? "" : ", ", family->model_type());
  }
  return FieldError(absl::StatusCode::kUnimplemented, "config.json.model_type",
                    absl::StrCat(model_type, " is not supported (", known, " are)"));
}

}  // namespace tandem
