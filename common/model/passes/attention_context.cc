#include "common/model/passes/attention_context.h"

#include "common/ops/ops.h"

namespace tandem {

at::Tensor CausalContext::Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return ops::CausalAttention(q, k, v, batch.offsets, layer.scores,
                              {.device_offsets = batch.device_offsets,
                               .prefixes = batch.prefixes,
                               .own_blocks = batch.own_blocks});
}

at::Tensor CachedContext::Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return ops::CachedAttention(q, k, v, batch.offsets, sequences_, cache_.keys(layer.index),
                              cache_.values(layer.index), layer.scores);
}

}  // namespace tandem
