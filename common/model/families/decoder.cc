#include "common/model/families/decoder.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/families/decoder_family.h"
#include "common/model/families/expert_mlp.h"
#include "common/model/families/gated_mlp.h"
#include "common/model/families/grouped_query_attention.h"
#include "common/model/families/row_parallel.h"
#include "common/model/rope.h"
#include "common/model/shard.h"
#include "common/ops/ops.h"
#include "common/ops/rank_sum.h"
#include "common/ops/token_shards.h"

namespace tandem {
Decoder::Decoder(const ModelConfig& config, const Placement& placement, ParameterStore& store)
    : config_(config), dtype_(placement.dtype), group_(placement.shard_group) {
  embedding_ = store.TakeEmbedding(kEmbeddingName);
  layers_.resize(static_cast<size_t>(config.num_hidden_layers));
  const LayerNormNames norms(config.decoder);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    if (!placement.Holds(i + 1)) continue;
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const std::string attention = prefix + "self_attn.";
    Layer& layer = layers_[static_cast<size_t>(i)];
    layer.attention = std::make_unique<GroupedQueryAttention>(config_, i, attention, group_, store);
    layer.output = &store.TakeLinear({attention + "o_proj"});
    if (config.decoder.experts.OfLayer(i)) {
      layer.feed_forward = std::make_unique<ExpertMlp>(config.decoder, prefix, group_, store);
    } else {
      layer.feed_forward = std::make_unique<GatedMlp>(prefix + "mlp.", group_, store);
    }
    layer.attention_norm = store.Take(absl::StrCat(prefix, norms.attention, ".weight"));
    layer.mlp_norm = store.Take(absl::StrCat(prefix, norms.mlp, ".weight"));
  }
  norm_ = store.Take("model.norm.weight");
  RopeFrequencies rope = ComputeRopeFrequencies(config.rope, config.head_dim);
  rotary_ = std::make_unique<ops::RotaryTable>(std::move(rope.inverse), rope.attention_scaling,
                                               placement.device);
}

ModelPass Decoder::StartPass(const RaggedBatch& batch, AttentionContext& context,
                             const at::Tensor& rows) const {
  const auto [cos, sin] = rotary_->Rows(batch.positions, batch.positions_end);
  return {.batch = batch, .context = context, .rows = rows, .cos = cos, .sin = sin};
}

at::Tensor Decoder::RunBlock(int64_t block, const at::Tensor& hidden, const ModelPass& pass) const {
  if (block == 0) return Embed(pass);
  if (block == num_blocks() - 1) {
    return Gathered(ops::RmsNorm(hidden, norm_, config_.rms_norm_eps), pass);
  }
  return RunLayer(block - 1, hidden, pass);
}

at::Tensor Decoder::Embed(const ModelPass& pass) const {
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

at::Tensor Decoder::Gathered(const at::Tensor& x, const ModelPass& pass) const {
  if (group_ == nullptr || !pass.shards_tokens) return x;
  return ops::GatherTokens(x, pass.batch.tokens.size(0), group_);
}

at::Tensor Decoder::Input(const at::Tensor& residual, const at::Tensor& norm,
                          const ModelPass& pass) const {
  return Gathered(
      config_.decoder.post_norm ? residual : ops::RmsNorm(residual, norm, config_.rms_norm_eps),
      pass);
}

at::Tensor Decoder::Addend(const at::Tensor& residual) const {
  return config_.decoder.post_norm ? at::Tensor() : residual;
}

at::Tensor Decoder::AfterOutput(const at::Tensor& residual, const at::Tensor& output,
                                const at::Tensor& norm) const {
  if (!config_.decoder.post_norm) return output;
  return residual + ops::RmsNorm(output, norm, config_.rms_norm_eps);
}

at::Tensor Decoder::RunLayer(int64_t index, at::Tensor x, const ModelPass& pass) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  at::Tensor attended = layer.attention->Attend(Input(x, layer.attention_norm, pass), pass);
  // After the last attention no block needs the other rows.
  if (pass.rows.defined() && index + 1 == config_.num_hidden_layers) {
    attended = attended.index_select(0, pass.rows);
    x = x.index_select(0, pass.rows);
  }
  x = AfterOutput(x, RowParallel(*layer.output, attended, Addend(x), pass, group_),
                  layer.attention_norm);
  const at::Tensor input = Input(x, layer.mlp_norm, pass);
  return AfterOutput(x, layer.feed_forward->Forward(input, Addend(x), pass), layer.mlp_norm);
}

}  // namespace tandem
