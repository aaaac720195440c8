#include "common/model/attention_context.h"

#include "common/ops/ops.h"

namespace tandem {

at::Tensor CausalContext::Attend(int64_t, const RaggedBatch& batch, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v) {
  return ops::CausalAttention(q, k, v, batch.offsets);
}

at::Tensor CachedContext::Attend(int64_t layer, const RaggedBatch& batch, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v) {
  return ops::CachedAttention(q, k, v, batch.offsets, sequences_, cache_.keys(layer),
                              cache_.values(layer));
}

}  // namespace tandem
