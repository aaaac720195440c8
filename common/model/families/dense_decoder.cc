#include "common/model/families/dense_decoder.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/families/dense_family.h"
#include "common/model/rope.h"
#include "common/model/shard.h"
#include "common/ops/ops.h"
#include "common/ops/pass_memory.h"
#include "common/ops/rank_sum.h"
#include "common/ops/token_shards.h"

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

DenseDecoder::DenseDecoder(const ModelConfig& config, const Placement& placement,
                           ParameterStore& store)
    : config_(config), dtype_(placement.dtype), group_(placement.shard_group) {
  embedding_ = store.TakeEmbedding(kEmbeddingName);
  layers_.resize(static_cast<size_t>(config.num_hidden_layers));
  const LayerNormNames norms(config.decoder);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    if (!placement.Holds(i + 1)) continue;
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer& layer = layers_[static_cast<size_t>(i)];
    layer.qkv =
        &store.TakeLinear({attention + "q_proj", attention + "k_proj", attention + "v_proj"});
    layer.output = &store.TakeLinear({attention + "o_proj"});
    layer.q_norm = store.Take(attention + "q_norm.weight");
    layer.k_norm = store.Take(attention + "k_norm.weight");
    layer.gate_up = &store.TakeLinear({mlp + "gate_proj", mlp + "up_proj"});
    layer.down = &store.TakeLinear({mlp + "down_proj"});
    layer.attention_norm = store.Take(absl::StrCat(prefix, norms.attention, ".weight"));
    layer.mlp_norm = store.Take(absl::StrCat(prefix, norms.mlp, ".weight"));
  }
  norm_ = store.Take("model.norm.weight");
  RopeFrequencies rope = ComputeRopeFrequencies(config.rope, config.head_dim);
  rotary_ = std::make_unique<ops::RotaryTable>(std::move(rope.inverse), rope.attention_scaling,
                                               placement.device);
}

at::Tensor DenseDecoder::Heads(const at::Tensor& x) const {
  return ops::SplitHeads(x, config_.head_dim);
}

DenseDecoder::QueriesAndKeys DenseDecoder::NormHeads(const Layer& layer, const at::Tensor& q,
                                                     const at::Tensor& k) const {
  const double eps = config_.rms_norm_eps;
  switch (config_.decoder.qk_norm) {
    case QkNorm::kNone:
      return {Heads(q), Heads(k)};
    case QkNorm::kEachHead:
      return {ops::RmsNorm(Heads(q), layer.q_norm, eps), ops::RmsNorm(Heads(k), layer.k_norm, eps)};
    case QkNorm::kAllHeads:
      break;
  }
  if (group_ == nullptr || group_->size() == 1) {
    return {Heads(ops::RmsNorm(q, layer.q_norm, eps)), Heads(ops::RmsNorm(k, layer.k_norm, eps))};
  }
  const at::Tensor squares =
      ops::SumInRankOrder(at::cat({SumOfSquares(q), SumOfSquares(k)}, 1), group_);
  return {
      Heads(RmsNormOfShard(q, squares.narrow(1, 0, 1), config_.query_size(), layer.q_norm, eps)),
      Heads(
          RmsNormOfShard(k, squares.narrow(1, 1, 1), config_.key_value_size(), layer.k_norm, eps))};
}

ModelPass DenseDecoder::StartPass(const RaggedBatch& batch, AttentionContext& context,
                                  const at::Tensor& rows) const {
  const auto [cos, sin] = rotary_->Rows(batch.positions, batch.positions_end);
  return {.batch = batch, .context = context, .rows = rows, .cos = cos, .sin = sin};
}

at::Tensor DenseDecoder::RunBlock(int64_t block, const at::Tensor& hidden,
                                  const ModelPass& pass) const {
  if (block == 0) return Embed(pass);
  if (block == num_blocks() - 1) {
    return Gathered(ops::RmsNorm(hidden, norm_, config_.rms_norm_eps), pass);
  }
  return RunLayer(block - 1, hidden, pass);
}

at::Tensor DenseDecoder::Embed(const ModelPass& pass) const {
  const at::Tensor& tokens = pass.batch.tokens;
  if (group_ == nullptr) return embedding_.Forward(tokens).to(dtype_);
  const Shard shard = {.index = group_->rank(), .count = group_->size()};
  const int64_t rows = embedding_.rows();
  const at::Tensor own = tokens - shard.Begin(config_.vocab_size);
  const at::Tensor others = own.lt(0).logical_or_(own.ge(rows));
  const at::Tensor found = embedding_.Forward(own.clamp(0, rows - 1)).to(dtype_);
  // One rank has the row and the others add zeros to it.
  const at::Tensor own_rows = found.masked_fill(others.unsqueeze(1), 0);
  return pass.shards_tokens ? ops::ScatterSum(own_rows, group_)
                            : ops::SumInRankOrder(own_rows, group_);
}

at::Tensor DenseDecoder::Gathered(const at::Tensor& x, const ModelPass& pass) const {
  if (group_ == nullptr || !pass.shards_tokens) return x;
  return ops::GatherTokens(x, pass.batch.tokens.size(0), group_);
}

at::Tensor DenseDecoder::Input(const at::Tensor& residual, const at::Tensor& norm,
                               const ModelPass& pass) const {
  return Gathered(
      config_.decoder.post_norm ? residual : ops::RmsNorm(residual, norm, config_.rms_norm_eps),
      pass);
}

at::Tensor DenseDecoder::AddOutput(const at::Tensor& residual, const ops::LinearWeight& map,
                                   const at::Tensor& x, const at::Tensor& norm,
                                   const ModelPass& pass) const {
  const bool post_norm = config_.decoder.post_norm;
  if (group_ == nullptr && !post_norm) return map.ForwardAdd(residual, x);
  const at::Tensor output = group_ == nullptr    ? map.Forward(x)
                            : pass.shards_tokens ? map.ForwardShard(x, group_)
                                                 : map.ForwardSum(x, group_);
  return ops::Add(residual, post_norm ? ops::RmsNorm(output, norm, config_.rms_norm_eps) : output);
}

at::Tensor DenseDecoder::RunLayer(int64_t index, at::Tensor x, const ModelPass& pass) const {
  const int64_t ranks = group_ == nullptr ? 1 : group_->size();
  const int64_t q_size = config_.query_size() / ranks, kv_size = config_.key_value_size() / ranks;
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const auto qkv = ops::SplitColumns(layer.qkv->Forward(Input(x, layer.attention_norm, pass)),
                                     {q_size, kv_size, kv_size});
  auto [q, k] = NormHeads(layer, qkv[0], qkv[1]);
  q = ops::RotaryEmbedding(q, pass.cos, pass.sin);
  k = ops::RotaryEmbedding(k, pass.cos, pass.sin);
  const at::Tensor v = Heads(qkv[2]);
  at::Tensor attended = pass.context.Attend(
      {.index = index, .window = config_.decoder.windows.OfLayer(index)}, pass.batch, q, k, v);
  // After the last attention no block needs the other rows.
  if (pass.rows.defined() && index + 1 == config_.num_hidden_layers) {
    attended = ops::SelectRows(attended, pass.rows);
    x = ops::SelectRows(x, pass.rows);
  }
  x = AddOutput(x, *layer.output, attended, layer.attention_norm, pass);
  const at::Tensor gate_up = layer.gate_up->Forward(Input(x, layer.mlp_norm, pass));
  return AddOutput(x, *layer.down, ops::SwiGlu(gate_up), layer.mlp_norm, pass);
}

}  // namespace tandem
