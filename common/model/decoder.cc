#include "common/model/decoder.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "common/model/rope.h"
#include "common/ops/ops.h"

namespace tandem {
namespace {

at::Tensor BiasOf(const Projection& projection) {
  return projection.biases.empty() ? at::Tensor() : projection.biases[0];
}

}  // namespace

DenseDecoder::DenseDecoder(const ModelConfig& config, const DecoderOptions& options,
                           ParameterStore& store)
    : config_(config) {
  using Init = ParameterStore::Init;
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  embedding_ = store.Add("model.embed_tokens.weight", {config.vocab_size, hidden}, Init::kNormal);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer layer;
    layer.qkv =
        store.AddProjection({attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                            {config.query_size(), config.key_value_size(), config.key_value_size()},
                            hidden, options.qkv_bias);
    layer.output = store.AddProjection({attention + "o_proj"}, {hidden}, config.query_size(),
                                       options.output_bias);
    if (options.qk_norm) {
      layer.q_norm = store.Add(attention + "q_norm.weight", {config.head_dim}, Init::kOnes);
      layer.k_norm = store.Add(attention + "k_norm.weight", {config.head_dim}, Init::kOnes);
    }
    layer.gate_up = store.AddProjection({mlp + "gate_proj", mlp + "up_proj"},
                                        {intermediate, intermediate}, hidden, options.mlp_bias);
    layer.down = store.AddProjection({mlp + "down_proj"}, {hidden}, intermediate, options.mlp_bias);
    layer.input_norm = store.Add(prefix + "input_layernorm.weight", {hidden}, Init::kOnes);
    layer.post_attention_norm =
        store.Add(prefix + "post_attention_layernorm.weight", {hidden}, Init::kOnes);
    layers_.push_back(std::move(layer));
  }
  norm_ = store.Add("model.norm.weight", {hidden}, Init::kOnes);
  RopeFrequencies rope = ComputeRopeFrequencies(config.rope, config.head_dim);
  rotary_ = std::make_unique<ops::RotaryTable>(std::move(rope.inverse), rope.attention_scaling);
}

// [T, heads * D] -> [T, heads, D], normalised if the layer does that.
at::Tensor DenseDecoder::Heads(const at::Tensor& x, const at::Tensor& norm) const {
  const at::Tensor heads = x.unflatten(1, {x.size(1) / config_.head_dim, config_.head_dim});
  return norm.defined() ? ops::RmsNorm(heads, norm, config_.rms_norm_eps) : heads;
}

at::Tensor DenseDecoder::HiddenStates(const RaggedBatch& batch, AttentionContext& context,
                                      const at::Tensor& rows) const {
  const double eps = config_.rms_norm_eps;
  const auto [cos, sin] = rotary_->Rows(batch.positions);
  at::Tensor x = ops::Embedding(batch.tokens, embedding_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const std::vector<at::Tensor> qkv = layer.qkv.Forward(ops::RmsNorm(x, layer.input_norm, eps));
    const at::Tensor q = ops::RotaryEmbedding(Heads(qkv[0], layer.q_norm), cos, sin);
    const at::Tensor k = ops::RotaryEmbedding(Heads(qkv[1], layer.k_norm), cos, sin);
    const at::Tensor v = Heads(qkv[2], {});
    at::Tensor attended = context.Attend(static_cast<int64_t>(i), batch, q, k, v);
    if (rows.defined() && i + 1 == layers_.size()) {  // nothing after this needs the other rows
      attended = attended.index_select(0, rows);
      x = x.index_select(0, rows);
    }
    x = ops::LinearAdd(x, attended, layer.output.weights[0], BiasOf(layer.output));
    const std::vector<at::Tensor> gate_up =
        layer.gate_up.Forward(ops::RmsNorm(x, layer.post_attention_norm, eps));
    x = ops::LinearAdd(x, ops::SwiGlu(gate_up[0], gate_up[1]), layer.down.weights[0],
                       BiasOf(layer.down));
  }
  return ops::RmsNorm(x, norm_, eps);
}

}  // namespace tandem
