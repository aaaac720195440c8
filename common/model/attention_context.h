// Where a layer's keys and values come from: the batch itself (training), or a cache (rollout).
#ifndef TANDEM_COMMON_MODEL_ATTENTION_CONTEXT_H_
#define TANDEM_COMMON_MODEL_ATTENTION_CONTEXT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "common/model/kv_cache.h"
#include "common/model/ragged_batch.h"

namespace tandem {

class AttentionContext {
 public:
  virtual ~AttentionContext() = default;

  // Causal attention of one layer. q [T, heads, head_dim], k and v [T, key_value_heads, head_dim],
  // rotated; returns [T, heads * head_dim]. The softmax scale is 1 / sqrt(head_dim).
  virtual at::Tensor Attend(int64_t layer, const RaggedBatch& batch, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v) = 0;
};

// Every sequence of the batch is whole and attends to itself. Differentiable.
class CausalContext : public AttentionContext {
 public:
  at::Tensor Attend(int64_t layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;
};

// Sequence s of the batch continues slot slots[s]: its keys and values are appended at the slot's
// cursor and it attends to everything before. The cursors are left to the caller to advance.
class CachedContext : public AttentionContext {
 public:
  CachedContext(KvCache& cache, std::vector<int64_t> slots)
      : cache_(cache), slots_(std::move(slots)) {}
  at::Tensor Attend(int64_t layer, const RaggedBatch& batch, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v) override;

 private:
  KvCache& cache_;
  std::vector<int64_t> slots_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_ATTENTION_CONTEXT_H_
