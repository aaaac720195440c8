#include "common/model/families/blocks/grouped_query_attention.h"

#include <ATen/ATen.h>

#include <utility>

#include "common/ops/ops.h"
#include "common/ops/shards/rank_sum.h"
#include "common/ops/threads/pass_memory.h"

namespace tandem {
namespace {

// RmsNorm of rows of `width` entries of which `x` [T, own] has the rank's own, with the sum of
// squares [T, 1] of all.
at::Tensor RmsNormOfShard(const at::Tensor& x, const at::Tensor& squares, int64_t width,
                          const at::Tensor& weight, double eps) {
  const at::Tensor scale = at::rsqrt(squares / width + eps);
  return (x.to(at::kFloat) * scale * weight.to(at::kFloat)).to(x.scalar_type());
}

at::Tensor SumOfSquares(const at::Tensor& x) {
  return x.to(at::kFloat).square().sum(1, /*keepdim=*/true);
}

}  // namespace

GroupedQueryAttention::GroupedQueryAttention(const ModelConfig& config, int64_t layer,
                                             const std::string& prefix,
                                             std::shared_ptr<ops::TensorParallelGroup> group,
                                             ParameterStore& store)
    : config_(config),
      layer_({.index = layer,
              .scores = {.window = config.decoder.windows.OfLayer(layer),
                         .scale = config.decoder.attention_scale,
                         .soft_cap = config.decoder.attention_soft_cap}}),
      group_(std::move(group)),
      qkv_(store.TakeLinear({prefix + "q_proj", prefix + "k_proj", prefix + "v_proj"})),
      q_norm_(store.Take(prefix + "q_norm.weight")),
      k_norm_(store.Take(prefix + "k_norm.weight")) {}

at::Tensor GroupedQueryAttention::Heads(const at::Tensor& x) const {
  return ops::SplitHeads(x, config_.head_dim);
}

GroupedQueryAttention::QueriesAndKeys GroupedQueryAttention::NormHeads(const at::Tensor& q,
                                                                       const at::Tensor& k) const {
  const double eps = config_.rms_norm_eps, offset = config_.decoder.norm_offset;
  switch (config_.decoder.qk_norm) {
    case QkNorm::kNone:
      return {Heads(q), Heads(k)};
    case QkNorm::kEachHead:
      return {ops::RmsNorm(Heads(q), q_norm_, eps, offset),
              ops::RmsNorm(Heads(k), k_norm_, eps, offset)};
    case QkNorm::kAllHeads:
      break;
  }
  if (group_ == nullptr || group_->size() == 1) {
    return {Heads(ops::RmsNorm(q, q_norm_, eps)), Heads(ops::RmsNorm(k, k_norm_, eps))};
  }
  const at::Tensor squares =
      ops::SumInRankOrder(at::cat({SumOfSquares(q), SumOfSquares(k)}, 1), group_);
  return {
      Heads(RmsNormOfShard(q, squares.narrow(1, 0, 1), config_.query_size(), q_norm_, eps)),
      Heads(RmsNormOfShard(k, squares.narrow(1, 1, 1), config_.key_value_size(), k_norm_, eps))};
}

at::Tensor GroupedQueryAttention::Attend(const at::Tensor& x, const ModelPass& pass) const {
  const int64_t ranks = group_ == nullptr ? 1 : group_->size();
  const int64_t q_size = config_.query_size() / ranks, kv_size = config_.key_value_size() / ranks;
  const auto qkv = ops::SplitColumns(qkv_.Forward(x), {q_size, kv_size, kv_size});
  auto [q, k] = NormHeads(qkv[0], qkv[1]);
  const Rotation& rotation = layer_.scores.window != kNoWindow && config_.window_rope
                                 ? pass.window_rotation
                                 : pass.rotation;
  q = ops::RotaryEmbedding(q, rotation.cos, rotation.sin);
  k = ops::RotaryEmbedding(k, rotation.cos, rotation.sin);
  return pass.context.Attend(layer_, pass.batch, q, k, Heads(qkv[2]));
}

}  // namespace tandem
