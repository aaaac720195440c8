#include "common/model/families/latent_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "common/model/rope.h"
#include "common/ops/head_linear.h"
#include "common/ops/ops.h"

namespace tandem {
namespace {

// Norms of latents have the default of `transformers`, whatever config.json says.
constexpr double kLatentNormEps = 1e-6;

std::vector<std::string> MapsToLatents(const LatentAttentionOptions& options,
                                       const std::string& prefix) {
  if (options.q_lora_rank == 0) return {prefix + "kv_a_proj_with_mqa"};
  return {prefix + "q_a_proj", prefix + "kv_a_proj_with_mqa"};
}

}  // namespace

LatentAttention::LatentAttention(const ModelConfig& config, int64_t layer,
                                 const std::string& prefix,
                                 const std::shared_ptr<ops::TensorParallelGroup>& group,
                                 ParameterStore& store)
    : options_(*config.decoder.latent),
      layer_({.index = layer}),
      query_factor_(std::sqrt(static_cast<double>(options_.cached_dim()) /
                              static_cast<double>(options_.qk_head_dim())) *
                    YarnScoreFactor(config.rope)),
      heads_(config.num_attention_heads / (group == nullptr ? 1 : group->size())),
      to_latents_(store.TakeLinear(MapsToLatents(options_, prefix))),
      to_queries_(store.TakeLinear({prefix + (options_.q_lora_rank > 0 ? "q_b_proj" : "q_proj")})),
      q_norm_(store.Take(prefix + "q_a_layernorm.weight")),
      kv_norm_(store.Take(prefix + "kv_a_layernorm.weight")),
      from_latent_(store.Take(prefix + "kv_b_proj.weight")) {}

at::Tensor LatentAttention::Rotated(const at::Tensor& x, const ModelPass& pass) const {
  if (!options_.rope_interleave) return ops::RotaryEmbedding(x, pass.cos, pass.sin);
  const at::Tensor halves = x.unflatten(2, {x.size(2) / 2, 2}).transpose(2, 3).flatten(2);
  return ops::RotaryEmbedding(halves, pass.cos, pass.sin);
}

at::Tensor LatentAttention::Queries(const at::Tensor& x, const at::Tensor& latents,
                                    const at::Tensor& maps, const ModelPass& pass) const {
  const at::Tensor input =
      q_norm_.defined()
          ? ops::RmsNorm(latents.narrow(1, 0, options_.q_lora_rank), q_norm_, kLatentNormEps)
          : x;
  const int64_t plain = options_.qk_nope_head_dim;
  const at::Tensor q = to_queries_.Forward(input).unflatten(1, {heads_, options_.qk_head_dim()});
  return at::cat({ops::TransposedHeadLinear(q.narrow(2, 0, plain), maps.narrow(1, 0, plain)),
                  Rotated(q.narrow(2, plain, options_.qk_rope_head_dim), pass)},
                 2) *
         query_factor_;
}

at::Tensor LatentAttention::Attend(const at::Tensor& x, const ModelPass& pass) const {
  const int64_t width = options_.kv_lora_rank, keys = options_.qk_nope_head_dim;
  const at::Tensor latents = to_latents_.Forward(x);
  const at::Tensor own = latents.narrow(1, options_.q_lora_rank, options_.cached_dim());
  const at::Tensor key =
      at::cat({ops::RmsNorm(own.narrow(1, 0, width), kv_norm_, kLatentNormEps).unsqueeze(1),
               Rotated(own.narrow(1, width, options_.qk_rope_head_dim).unsqueeze(1), pass)},
              2);
  const at::Tensor maps =
      from_latent_.to(x.scalar_type()).view({heads_, keys + options_.v_head_dim, width});
  const at::Tensor attended = pass.context.Attend(
      layer_, pass.batch, Queries(x, latents, maps, pass), key, key.narrow(2, 0, width));
  return ops::HeadLinear(attended.unflatten(1, {heads_, width}),
                         maps.narrow(1, keys, options_.v_head_dim))
      .flatten(1);
}

}  // namespace tandem
