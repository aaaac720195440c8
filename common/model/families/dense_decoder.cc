#include "common/model/families/dense_decoder.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/rope.h"
#include "common/model/shard.h"
#include "common/ops/ops.h"
#include "common/ops/rank_sum.h"
#include "common/ops/token_shards.h"

namespace tandem {

DenseDecoder::DenseDecoder(const ModelConfig& config, const Placement& placement,
                           ParameterStore& store)
    : config_(config), dtype_(placement.dtype), group_(placement.shard_group) {
  embedding_ = store.Take(kEmbeddingName);
  layers_.resize(static_cast<size_t>(config.num_hidden_layers));
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
    layer.input_norm = store.Take(prefix + "input_layernorm.weight");
    layer.post_attention_norm = store.Take(prefix + "post_attention_layernorm.weight");
  }
  norm_ = store.Take("model.norm.weight");
  RopeFrequencies rope = ComputeRopeFrequencies(config.rope, config.head_dim);
  rotary_ = std::make_unique<ops::RotaryTable>(std::move(rope.inverse), rope.attention_scaling,
                                               placement.device);
}

// [T, heads * D] -> [T, heads, D], normalised if `norm` is defined.
at::Tensor DenseDecoder::Heads(const at::Tensor& x, const at::Tensor& norm) const {
  const at::Tensor heads = x.unflatten(1, {x.size(1) / config_.head_dim, config_.head_dim});
  return norm.defined() ? ops::RmsNorm(heads, norm, config_.rms_norm_eps) : heads;
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
  if (group_ == nullptr) return ops::Embedding(tokens, embedding_).to(dtype_);
  const Shard shard = {.index = group_->rank(), .count = group_->size()};
  const int64_t rows = embedding_.size(0);
  const at::Tensor own = tokens - shard.Begin(config_.vocab_size);
  const at::Tensor others = own.lt(0).logical_or_(own.ge(rows));
  const at::Tensor found = ops::Embedding(own.clamp(0, rows - 1), embedding_).to(dtype_);
  // One rank has the row and the others add zeros to it.
  const at::Tensor own_rows = found.masked_fill(others.unsqueeze(1), 0);
  return pass.shards_tokens ? ops::ScatterSum(own_rows, group_)
                            : ops::SumInRankOrder(own_rows, *group_);
}

at::Tensor DenseDecoder::Gathered(const at::Tensor& x, const ModelPass& pass) const {
  if (group_ == nullptr || !pass.shards_tokens) return x;
  return ops::GatherTokens(x, pass.batch.tokens.size(0), group_);
}

at::Tensor DenseDecoder::AddSum(const at::Tensor& residual, const ops::LinearWeight& map,
                                const at::Tensor& x, const ModelPass& pass) const {
  if (group_ == nullptr) return map.ForwardAdd(residual, x);
  return pass.shards_tokens ? map.ForwardAddShard(residual, x, group_)
                            : map.ForwardAddSum(residual, x, *group_);
}

at::Tensor DenseDecoder::RunLayer(int64_t index, at::Tensor x, const ModelPass& pass) const {
  const double eps = config_.rms_norm_eps;
  const int64_t ranks = group_ == nullptr ? 1 : group_->size();
  const int64_t q_size = config_.query_size() / ranks, kv_size = config_.key_value_size() / ranks;
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const std::vector<at::Tensor> qkv =
      layer.qkv->Forward(Gathered(ops::RmsNorm(x, layer.input_norm, eps), pass))
          .split_with_sizes({q_size, kv_size, kv_size}, 1);
  const at::Tensor q = ops::RotaryEmbedding(Heads(qkv[0], layer.q_norm), pass.cos, pass.sin);
  const at::Tensor k = ops::RotaryEmbedding(Heads(qkv[1], layer.k_norm), pass.cos, pass.sin);
  const at::Tensor v = Heads(qkv[2], {});
  at::Tensor attended = pass.context.Attend(index, pass.batch, q, k, v);
  // After the last attention no block needs the other rows.
  if (pass.rows.defined() && index + 1 == config_.num_hidden_layers) {
    attended = attended.index_select(0, pass.rows);
    x = x.index_select(0, pass.rows);
  }
  x = AddSum(x, *layer.output, attended, pass);
  const at::Tensor gate_up =
      layer.gate_up->Forward(Gathered(ops::RmsNorm(x, layer.post_attention_norm, eps), pass));
  return AddSum(x, *layer.down, ops::SwiGlu(gate_up), pass);
}

}  // namespace tandem
