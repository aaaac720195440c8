#include "common/model/families/blocks/decoder.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/families/blocks/expert_mlp.h"
#include "common/model/families/blocks/gated_mlp.h"
#include "common/model/families/blocks/grouped_query_attention.h"
#include "common/model/families/blocks/latent_attention.h"
#include "common/model/families/blocks/row_parallel.h"
#include "common/model/families/decoder_family.h"
#include "common/model/parameters/shard.h"
#include "common/model/passes/rope.h"
#include "common/model/vision/mrope_rows.h"
#include "common/ops/ops.h"
#include "common/ops/shards/rank_sum.h"
#include "common/ops/shards/token_shards.h"

namespace tandem {
Decoder::Decoder(const ModelConfig& config, const Placement& placement, ParameterStore& store)
    : config_(config), dtype_(placement.dtype), group_(placement.shard_group) {
  embedding_ = store.TakeEmbedding(kEmbeddingName);
  layers_.resize(static_cast<size_t>(config.num_hidden_layers));
  const LayerNormNames norms(config.decoder);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    if (!placement.Holds(config.FirstLayerBlock() + i)) continue;
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const std::string attention = prefix + "self_attn.";
    Layer& layer = layers_[static_cast<size_t>(i)];
    if (config.decoder.latent.has_value()) {
      layer.attention = std::make_unique<LatentAttention>(config_, i, attention, store);
    } else {
      layer.attention =
          std::make_unique<GroupedQueryAttention>(config_, i, attention, group_, store);
    }
    layer.output = &store.TakeLinear({attention + "o_proj"});
    if (config.decoder.experts.OfLayer(i)) {
      layer.feed_forward = std::make_unique<ExpertMlp>(
          config.decoder, i, prefix + config.decoder.expert_names.network, placement, store);
    } else {
      layer.feed_forward =
          std::make_unique<GatedMlp>(prefix + "mlp.", config.decoder.activation, group_, store);
    }
    const auto norm = [&](const std::string& name) {
      return store.Take(absl::StrCat(prefix, name, ".weight"));
    };
    layer.attention_norms = {norm(norms.attention_input), norm(norms.attention_output)};
    layer.mlp_norms = {norm(norms.mlp_input), norm(norms.mlp_output)};
  }
  // `transformers` rounds it, too.
  embedding_scale_ =
      at::scalar_tensor(std::sqrt(static_cast<double>(config.hidden_size)), dtype_).item<double>();
  norm_ = store.Take("model.norm.weight");
  const auto rotary = [&](const RopeConfig& config_of_rope) {
    RopeFrequencies rope =
        ComputeRopeFrequencies(config_of_rope, config_of_rope.rotary_dim.value_or(config.head_dim));
    return std::make_unique<ops::RotaryTable>(
        std::move(rope.inverse), rope.attention_scaling,
        config.LongestSequence(std::numeric_limits<int64_t>::max()), placement.device);
  };
  rotary_ = rotary(config.rope);
  if (config.window_rope) window_rotary_ = rotary(*config.window_rope);
  if (config.vision.has_value() && placement.Holds(kVisionBlock)) {
    vision_ =
        std::make_unique<VisionTower>(*config.vision, placement.dtype, placement.device, store);
  }
}

ModelPass Decoder::StartPass(const RaggedBatch& batch, AttentionContext& context,
                             const at::Tensor& rows) const {
  const auto rotation = [&](ops::RotaryTable& table) {
    auto [cos, sin] = batch.images.rotary_positions.defined()
                          ? MropeRows(table, config_.rope.mrope_section, batch)
                          : table.Rows(batch.positions, batch.positions_end);
    return Rotation{std::move(cos), std::move(sin)};
  };
  return {.batch = batch,
          .context = context,
          .rows = rows,
          .rotation = rotation(*rotary_),
          .window_rotation = window_rotary_ == nullptr ? Rotation{} : rotation(*window_rotary_)};
}

void Decoder::ReservePositions(int64_t end) const {
  rotary_->Reserve(end);
  if (window_rotary_ != nullptr) window_rotary_->Reserve(end);
}

at::Tensor Decoder::RunBlock(int64_t block, const at::Tensor& hidden, const ModelPass& pass) const {
  if (block == 0) return Embed(pass);
  if (block == num_blocks() - 1) {
    return Gathered(Normed(hidden, norm_), pass);
  }
  if (block < config_.FirstLayerBlock()) return PutImages(hidden, pass);
  return RunLayer(block - config_.FirstLayerBlock(), hidden, pass);
}

at::Tensor Decoder::Embedded(const at::Tensor& tokens) const {
  const at::Tensor rows = embedding_.Forward(tokens).to(dtype_);
  return config_.decoder.scale_embeddings ? ops::Scale(rows, embedding_scale_) : rows;
}

at::Tensor Decoder::Normed(const at::Tensor& x, const at::Tensor& weight) const {
  return ops::RmsNorm(x, weight, config_.rms_norm_eps, config_.decoder.norm_offset);
}

at::Tensor Decoder::Embed(const ModelPass& pass) const {
  const at::Tensor& tokens = pass.batch.tokens;
  if (group_ == nullptr) return Embedded(tokens);
  const Shard shard = {.index = group_->rank(), .count = group_->size()};
  const int64_t rows = embedding_.rows();
  const at::Tensor own = tokens - shard.Begin(config_.vocab_size);
  const at::Tensor others = own.lt(0).logical_or_(own.ge(rows));
  const at::Tensor found = Embedded(own.clamp(0, rows - 1));
  // One rank has the row and the others add zeros to it.
  const at::Tensor own_rows = found.masked_fill(others.unsqueeze(1), 0);
  return pass.shards_tokens ? ops::ScatterSum(own_rows, group_)
                            : ops::SumInRankOrder(own_rows, group_);
}

at::Tensor Decoder::ImageRows(const at::Tensor& pixel_values,
                              const std::vector<VisionGrid>& grids) const {
  TORCH_CHECK(vision_ != nullptr, "this rank has no vision tower");
  return vision_->Forward(pixel_values, grids);
}

at::Tensor Decoder::PutImages(const at::Tensor& hidden, const ModelPass& pass) const {
  const BatchImages& images = pass.batch.images;
  if (images.empty()) return hidden;
  const at::Tensor rows = images.rows_of_tower.defined()
                              ? images.rows_of_tower
                              : ImageRows(images.pixel_values, images.grids);
  if (group_ == nullptr || !pass.shards_tokens) {
    return hidden.index_copy(0, images.token_rows, rows.index_select(0, images.tower_rows));
  }
  // Every rank computes the whole tower, and puts the rows of its shard of the tokens.
  const int64_t begin = group_->rank() * hidden.size(0);
  const at::Tensor own = images.token_rows.ge(begin)
                             .logical_and_(images.token_rows.lt(begin + hidden.size(0)))
                             .nonzero()
                             .squeeze(1);
  return hidden.index_copy(0, images.token_rows.index_select(0, own) - begin,
                           rows.index_select(0, images.tower_rows.index_select(0, own)));
}

at::Tensor Decoder::Gathered(const at::Tensor& x, const ModelPass& pass) const {
  if (group_ == nullptr || !pass.shards_tokens) return x;
  return ops::GatherTokens(x, pass.batch.tokens.size(0), group_);
}

at::Tensor Decoder::Input(const at::Tensor& residual, const Norms& norms,
                          const ModelPass& pass) const {
  return Gathered(norms.input.defined() ? Normed(residual, norms.input) : residual, pass);
}

at::Tensor Decoder::AfterOutput(const at::Tensor& residual, const at::Tensor& output,
                                const Norms& norms) const {
  return norms.output.defined() ? ops::Add(residual, Normed(output, norms.output)) : output;
}

at::Tensor Decoder::RunLayer(int64_t index, at::Tensor x, const ModelPass& pass) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  at::Tensor attended = layer.attention->Attend(Input(x, layer.attention_norms, pass), pass);
  // After the last attention no block needs the other rows.
  if (pass.rows.defined() && index + 1 == config_.num_hidden_layers) {
    attended = ops::SelectRows(attended, pass.rows);
    x = ops::SelectRows(x, pass.rows);
  }
  x = AfterOutput(
      x, RowParallel(*layer.output, attended, Addend(x, layer.attention_norms), pass, group_),
      layer.attention_norms);
  const Norms& norms = layer.mlp_norms;
  return AfterOutput(x, layer.feed_forward->Forward(Input(x, norms, pass), Addend(x, norms), pass),
                     norms);
}

}  // namespace tandem
