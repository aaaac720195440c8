// Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434, section 2.1), in its absorbed
// form. With the latent c of a token, and the maps W_k and W_v of a head from c to its key and its
// value, the other form expands c for every head:
//   score = q (W_k c)^T + rotated part,   output = sum p (W_v c).
// Here a head's query is multiplied instead, and what it attends to is expanded once:
//   score = (q W_k) c^T + rotated part,   output = W_v (sum p c).
// All heads then share one key, [c, rotated key], whose first columns are their value. Training,
// prefill and decoding all compute this form, so that they have the same bits (ADR 57).
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_LATENT_ATTENTION_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_LATENT_ATTENTION_H_

#include <cstdint>
#include <string>

#include "common/model/config/model_config.h"
#include "common/model/families/blocks/self_attention.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/passes/attention_context.h"
#include "common/ops/linear/linear_weight.h"

namespace tandem {

// A shard has whole heads; the latents are computed alike on every rank.
class LatentAttention : public SelfAttention {
 public:
  // Takes the parameters of AddLatentAttention but for "<prefix>o_proj" from `store`. `config` must
  // outlive it.
  LatentAttention(const ModelConfig& config, int64_t layer, const std::string& prefix,
                  ParameterStore& store);

  at::Tensor Attend(const at::Tensor& x, const ModelPass& pass) const override;

 private:
  // The two maps of every head from the latent, views of kv_b_proj.
  struct HeadMaps {
    at::Tensor keys;    // [heads, qk_nope_head_dim, kv_lora_rank]
    at::Tensor values;  // [heads, v_head_dim, kv_lora_rank]
  };

  HeadMaps Maps(at::ScalarType type) const;
  // Rotates x [T, heads, qk_rope_head_dim]. The result has the halves of the pairs apart, as
  // queries and keys both have.
  at::Tensor Rotated(const at::Tensor& x, const ModelPass& pass) const;
  // Returns the queries of this rank's heads [T, heads, cached_dim] to keys of latents. `latents`
  // [T, q_lora_rank + cached_dim] are those of x.
  at::Tensor Queries(const at::Tensor& x, const at::Tensor& latents, const HeadMaps& maps,
                     const ModelPass& pass) const;

  const LatentAttentionOptions options_;
  const AttentionLayer layer_;
  const ops::LinearWeight& to_latents_;  // of queries, if they have one, and of keys and values
  const ops::LinearWeight& to_queries_;
  const at::Tensor q_norm_, kv_norm_;  // undefined without a latent of queries; [kv_lora_rank]
  const at::Tensor from_latent_;       // kv_b_proj
  const int64_t heads_;                // of this rank
  // The maps of a model that infers, whose passes make no views of parameters.
  HeadMaps inference_maps_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_LATENT_ATTENTION_H_
