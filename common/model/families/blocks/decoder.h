// The decoder that Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma 2, Gemma 3, Phi-3, Mixtral,
// Qwen2-MoE, Qwen3-MoE, DeepSeek-V3, and behind a vision tower Qwen2-VL and Qwen2.5-VL, are
// variants of (decoder_family.h): RMSNorm, rotary grouped-query attention or latent attention
// (latent_attention.h), SwiGLU (https://arxiv.org/abs/2302.13971), in some layers of several
// experts (expert_mlp.h).
//
// A shard computes with the others of Placement::shard_group: heads, the MLP's inner columns and
// the vocabulary are sharded over the ranks, and between linear maps each rank keeps the hidden
// states of its shard of the tokens (common/ops/shards/token_shards.h). A pass sends, forward and
// backward alike and for each layer, two all-gathers and two reduce-scatters of [T, H], and one of
// each for the embedding and the final norm together. The gathered tensors are kept for the
// backward pass: keeping shards would cost two more all-gathers a layer to save 2 T H (1 - 1/n)
// values of its memory. Norms of all heads of a token (QkNorm::kAllHeads) send one all-gather of
// [T, 2] more, the sums of squares of queries and keys. With Placement::expert_group a layer with
// experts also exchanges the rows of its tokens (common/ops/experts/expert_exchange.h).
//
// A pass with a KV cache has few tokens and waits for each exchange: there every rank keeps all
// tokens, and a layer is two sums of [T, H] in the order of the ranks
// (common/ops/shards/rank_sum.h), and one of those squares, the embedding one of [T, H].
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_DECODER_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_DECODER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "common/model/config/model_config.h"
#include "common/model/families/blocks/feed_forward.h"
#include "common/model/families/blocks/self_attention.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/passes/backbone.h"
#include "common/model/vision/vision_tower.h"
#include "common/ops/linear/embedding_weight.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/rotary/rotary_table.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

class Decoder : public Backbone {
 public:
  // Takes the parameters of DecoderFamily::Parameters from `store`, which must outlive the decoder.
  // Blocks that `placement` does not hold cannot be run.
  Decoder(const ModelConfig& config, const Placement& placement, ParameterStore& store);

  ModelPass StartPass(const RaggedBatch& batch, AttentionContext& context,
                      const at::Tensor& rows) const override;
  void ReservePositions(int64_t end) const override;
  int64_t num_blocks() const override { return config_.LastBlock() + 1; }
  at::Tensor RunBlock(int64_t block, const at::Tensor& hidden,
                      const ModelPass& pass) const override;

  at::Tensor ImageRows(const at::Tensor& pixel_values,
                       const std::vector<VisionGrid>& grids) const override;

 private:
  // The weights of the norms of a sublayer's input and output, undefined where it has none.
  struct Norms {
    at::Tensor input, output;
  };
  struct Layer {
    Norms attention_norms, mlp_norms;
    std::unique_ptr<SelfAttention> attention;
    const ops::LinearWeight* output = nullptr;  // of the attention
    std::unique_ptr<FeedForward> feed_forward;
  };

  at::Tensor RunLayer(int64_t index, at::Tensor x, const ModelPass& pass) const;
  at::Tensor Embed(const ModelPass& pass) const;
  // Returns `hidden` with the rows of the pass's images in the place of their tokens.
  at::Tensor PutImages(const at::Tensor& hidden, const ModelPass& pass) const;
  // Gathers all tokens from the ranks' shards of them.
  at::Tensor Gathered(const at::Tensor& x, const ModelPass& pass) const;
  at::Tensor Normed(const at::Tensor& x, const at::Tensor& weight) const;
  // Returns the input of attention or feed-forward network, for all tokens, from the residual.
  at::Tensor Input(const at::Tensor& residual, const Norms& norms, const ModelPass& pass) const;
  // Returns the residual after a sublayer that returned `output` for Addend(residual, norms).
  at::Tensor AfterOutput(const at::Tensor& residual, const at::Tensor& output,
                         const Norms& norms) const;
  // Returns the tensor that attention and feed-forward network add their output to themselves:
  // `residual`, or an undefined one if the output is normalised first.
  static at::Tensor Addend(const at::Tensor& residual, const Norms& norms) {
    return norms.output.defined() ? at::Tensor() : residual;
  }
  // Returns the embeddings of tokens of this rank's rows, as the first layer reads them.
  at::Tensor Embedded(const at::Tensor& tokens) const;

  ModelConfig config_;
  at::ScalarType dtype_;                             // of the computation
  std::shared_ptr<ops::TensorParallelGroup> group_;  // nullptr: the model is whole
  ops::EmbeddingWeight embedding_;
  double embedding_scale_ = 1;  // sqrt(hidden_size), rounded to dtype_
  std::vector<Layer> layers_;
  at::Tensor norm_;
  std::unique_ptr<ops::RotaryTable> rotary_, window_rotary_;  // the second as window_rope
  std::unique_ptr<VisionTower> vision_;  // nullptr: the model has none, or its block is not held
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_DECODER_H_
