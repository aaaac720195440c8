// The keys and values that a layer attends to: those of the batch (training) or a cache (rollout).
#ifndef TANDEM_COMMON_MODEL_PASSES_ATTENTION_CONTEXT_H_
#define TANDEM_COMMON_MODEL_PASSES_ATTENTION_CONTEXT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/model/passes/kv_cache.h"
#include "common/model/passes/ragged_batch.h"
#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/paged_sequences.h"

namespace tandem {

// The layer of a model whose attention is computed, and how it attends: the backbone says it, and
// every context obeys.
struct AttentionLayer {
  int64_t index = 0;
  ops::AttentionScores scores = {};
  // Whether values are the first columns of the keys (latent attention): a view of them.
  bool values_in_keys = false;
};

class AttentionContext {
 public:
  virtual ~AttentionContext() = default;

  // Causal attention of one layer. q [T, heads, head_dim] and k [T, key_value_heads, head_dim],
  // rotated, v [T, key_value_heads, value_dim], not wider; returns [T, heads * value_dim].
  virtual at::Tensor Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                            const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) = 0;

  // Returns the sum of `values`, which has no gradient, over the ranks that hold tokens of the
  // batch's sequences; collective over them. `values` itself where all tokens are here.
  virtual at::Tensor SumOverRanks(const at::Tensor& values) { return values; }
};

// Attention of whole sequences, each to itself. Differentiable.
class CausalContext : public AttentionContext {
 public:
  at::Tensor Attend(const AttentionLayer& layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;
};

// Attention over a KV cache: the keys and values of the batch are written into the blocks of their
// sequences, which attend to all tokens before.
class CachedContext : public AttentionContext {
 public:
  // `sequences` outlives the context.
  CachedContext(KvCache& cache, const ops::PagedSequences& sequences)
      : cache_(cache), sequences_(sequences) {}
  at::Tensor Attend(const AttentionLayer& layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;

 private:
  KvCache& cache_;
  const ops::PagedSequences& sequences_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PASSES_ATTENTION_CONTEXT_H_
