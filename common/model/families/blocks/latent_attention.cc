#include "common/model/families/blocks/latent_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/model/passes/rope.h"
#include "common/ops/linear/head_linear.h"
#include "common/ops/ops.h"
#include "common/ops/threads/pass_memory.h"

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
                                 const std::string& prefix, ParameterStore& store)
    : options_(*config.decoder.latent),
      layer_({.index = layer,
              .scores = {.scale = YarnScoreFactor(config.rope) /
                                  std::sqrt(static_cast<double>(options_.qk_head_dim()))},
              .values_in_keys = true}),
      to_latents_(store.TakeLinear(MapsToLatents(options_, prefix))),
      to_queries_(store.TakeLinear({prefix + (options_.q_lora_rank > 0 ? "q_b_proj" : "q_proj")})),
      q_norm_(store.Take(prefix + "q_a_layernorm.weight")),
      kv_norm_(store.Take(prefix + "kv_a_layernorm.weight")),
      from_latent_(store.Take(prefix + "kv_b_proj.weight")),
      heads_(from_latent_.size(0) / (options_.qk_nope_head_dim + options_.v_head_dim)) {
  if (!from_latent_.requires_grad()) inference_maps_ = Maps(from_latent_.scalar_type());
}

LatentAttention::HeadMaps LatentAttention::Maps(at::ScalarType type) const {
  const int64_t keys = options_.qk_nope_head_dim, values = options_.v_head_dim;
  const at::Tensor maps =
      from_latent_.to(type).view({heads_, keys + values, options_.kv_lora_rank});
  return {maps.narrow(1, 0, keys), maps.narrow(1, keys, values)};
}

at::Tensor LatentAttention::Rotated(const at::Tensor& x, const ModelPass& pass) const {
  return ops::RotaryEmbedding(options_.rope_interleave ? ops::SplitPairs(x) : x, pass.rotation.cos,
                              pass.rotation.sin);
}

at::Tensor LatentAttention::Queries(const at::Tensor& x, const at::Tensor& latents,
                                    const HeadMaps& maps, const ModelPass& pass) const {
  at::Tensor input = x;
  if (q_norm_.defined()) {
    input = ops::RmsNorm(ops::Narrow(latents, 1, 0, options_.q_lora_rank), q_norm_, kLatentNormEps);
  }
  const at::Tensor q = ops::SplitHeads(to_queries_.Forward(input), options_.qk_head_dim());
  const int64_t plain = options_.qk_nope_head_dim;
  return ops::JoinWidths(ops::TransposedHeadLinear(ops::Narrow(q, 2, 0, plain), maps.keys),
                         Rotated(ops::Narrow(q, 2, plain, options_.qk_rope_head_dim), pass));
}

at::Tensor LatentAttention::Attend(const at::Tensor& x, const ModelPass& pass) const {
  const int64_t width = options_.kv_lora_rank, rotated = options_.qk_rope_head_dim;
  const int64_t begin = options_.q_lora_rank;
  // Masters that do not train may have another type than the computation.
  const bool ready =
      inference_maps_.keys.defined() && inference_maps_.keys.scalar_type() == x.scalar_type();
  const HeadMaps maps = ready ? inference_maps_ : Maps(x.scalar_type());
  const at::Tensor latents = to_latents_.Forward(x);
  const at::Tensor latent =
      ops::RmsNorm(ops::Narrow(latents, 1, begin, width), kv_norm_, kLatentNormEps);
  const at::Tensor key = ops::JoinWidths(
      ops::SplitHeads(latent, width),
      Rotated(ops::SplitHeads(ops::Narrow(latents, 1, begin + width, rotated), rotated), pass));
  const at::Tensor attended = pass.context.Attend(
      layer_, pass.batch, Queries(x, latents, maps, pass), key, ops::Narrow(key, 2, 0, width));
  return ops::HeadLinear(attended, maps.values);
}

}  // namespace tandem
