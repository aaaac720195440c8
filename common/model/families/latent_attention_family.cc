#include "common/model/families/latent_attention_family.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/config/rope_config.h"

namespace tandem {

absl::StatusOr<LatentAttentionOptions> ReadLatentAttention(const ConfigFields& fields) {
  LatentAttentionOptions options;
  TANDEM_ASSIGN_OR_RETURN(const auto q_lora_rank, fields.MaybeSize("q_lora_rank"));
  options.q_lora_rank = q_lora_rank.value_or(0);
  TANDEM_ASSIGN_OR_RETURN(options.kv_lora_rank, fields.Size("kv_lora_rank"));
  TANDEM_ASSIGN_OR_RETURN(options.qk_nope_head_dim, fields.Size("qk_nope_head_dim"));
  TANDEM_ASSIGN_OR_RETURN(options.qk_rope_head_dim, fields.Size("qk_rope_head_dim"));
  TANDEM_ASSIGN_OR_RETURN(options.v_head_dim, fields.Size("v_head_dim"));
  if (options.qk_rope_head_dim % 2 != 0) {
    return InvalidField(fields.Path("qk_rope_head_dim"), "must be even for rotary embeddings");
  }
  TANDEM_ASSIGN_OR_RETURN(options.rope_interleave, fields.Truth("rope_interleave"));
  TANDEM_ASSIGN_OR_RETURN(options.latent_bias, fields.Bool("attention_bias"));
  return options;
}

absl::Status ReadLatentHeads(const ConfigFields& fields, ModelConfig& config) {
  config.head_dim = config.decoder.latent->qk_rope_head_dim;
  TANDEM_ASSIGN_OR_RETURN(const auto head_dim, fields.MaybeSize("head_dim"));
  if (head_dim.value_or(config.head_dim) != config.head_dim) {
    return InvalidField(fields.Path("head_dim"),
                        absl::StrCat("must be qk_rope_head_dim (", config.head_dim,
                                     "), the width that is rotated"));
  }
  if (config.num_key_value_heads != config.num_attention_heads) {
    return InvalidField(fields.Path("num_key_value_heads"),
                        absl::StrCat("must be num_attention_heads (", config.num_attention_heads,
                                     "), as all heads share the latent"));
  }
  TANDEM_ASSIGN_OR_RETURN(const auto rope, RopeObject(fields));
  if (!rope.has_value() || rope->Find("mscale_all_dim") == nullptr) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const std::string type, RopeType(*rope));
  if (type == "yarn" || type == "default") return absl::OkStatus();
  return rope->NotSupported("mscale_all_dim", absl::StrCat("a scale for rope type ", type));
}

void AddLatentAttention(const ModelConfig& config, const std::string& prefix, ParameterList& list) {
  const LatentAttentionOptions& latent = *config.decoder.latent;
  const int64_t heads = config.num_attention_heads, queries = heads * latent.qk_head_dim();
  if (latent.q_lora_rank > 0) {
    list.Whole(prefix + "q_a_proj", latent.q_lora_rank, latent.latent_bias);
    list.Norm(prefix + "q_a_layernorm", latent.q_lora_rank);
    list.ColumnParallelFrom(prefix + "q_b_proj", latent.q_lora_rank, queries);
  } else {
    list.ColumnParallel(prefix + "q_proj", queries, /*bias=*/false);
  }
  list.Whole(prefix + "kv_a_proj_with_mqa", latent.cached_dim(), latent.latent_bias);
  list.Norm(prefix + "kv_a_layernorm", latent.kv_lora_rank);
  // Multiplied head by head, by its rows and by its columns, which no packed format offers.
  list.ColumnParallelFrom(prefix + "kv_b_proj", latent.kv_lora_rank,
                          heads * (latent.qk_nope_head_dim + latent.v_head_dim),
                          /*stays_dense=*/true);
  list.RowParallel(prefix + "o_proj", heads * latent.v_head_dim, config.decoder.output_bias);
}

std::vector<WeightFileSize> LatentFileSizes(const ModelConfig& config, const std::string& prefix) {
  const LatentAttentionOptions& latent = *config.decoder.latent;
  const int64_t heads = config.num_attention_heads;
  std::vector<WeightFileSize> sizes = {
      {prefix + "kv_b_proj.weight", 1, latent.kv_lora_rank, "kv_lora_rank"},
      {prefix + "kv_a_proj_with_mqa.weight", 0, latent.cached_dim(), "qk_rope_head_dim",
       "plus kv_lora_rank "},
      {prefix + "o_proj.weight", 1, heads * latent.v_head_dim, "num_attention_heads",
       "times v_head_dim "},
      {prefix + "kv_b_proj.weight", 0, heads * (latent.qk_nope_head_dim + latent.v_head_dim),
       "qk_nope_head_dim", "plus v_head_dim, times num_attention_heads, "}};
  if (latent.q_lora_rank > 0) {
    sizes.push_back({prefix + "q_a_proj.weight", 0, latent.q_lora_rank, "q_lora_rank"});
  }
  return sizes;
}

std::vector<LayerCache> LatentCacheLayout(const ModelConfig& config) {
  const LatentAttentionOptions& latent = *config.decoder.latent;
  return std::vector<LayerCache>(
      static_cast<size_t>(config.num_hidden_layers),
      {.heads = 1, .head_dim = latent.cached_dim(), .value_dim = latent.kv_lora_rank});
}

// The latents before and after their norms; of a head its query, absorbed and joined with the
// rotated part, and the result, absorbed and expanded.
int64_t LatentInferenceActivations(const ModelConfig& config, int64_t shard_count) {
  const LatentAttentionOptions& latent = *config.decoder.latent;
  const int64_t heads = config.num_attention_heads / shard_count;
  return 2 * (latent.q_lora_rank + latent.cached_dim()) +
         heads * (latent.qk_head_dim() + 2 * latent.cached_dim() + latent.kv_lora_rank +
                  latent.v_head_dim);
}

// The latents, as above; of a head its query, the absorbed query with the rotated part, the result
// that is expanded, and that which is not.
int64_t LatentTrainingActivations(const ModelConfig& config, int64_t shard_count) {
  const LatentAttentionOptions& latent = *config.decoder.latent;
  const int64_t heads = config.num_attention_heads / shard_count;
  return 2 * (latent.q_lora_rank + latent.cached_dim()) +
         heads *
             (latent.qk_head_dim() + latent.cached_dim() + latent.kv_lora_rank + latent.v_head_dim);
}

}  // namespace tandem
