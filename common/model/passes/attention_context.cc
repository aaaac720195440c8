#include "common/model/passes/attention_context.h"

#include "common/ops/ops.h"

namespace tandem {

at::Tensor CausalContext::Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return ops::CausalAttention(q, k, v, batch.offsets, layer.scores, batch.tables);
}

at::Tensor CachedContext::Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return ops::CachedAttention(q, k, v, batch.offsets, sequences_, cache_.keys(layer.index),
                              cache_.values(layer.index), layer.scores);
}

}  // namespace tandem
