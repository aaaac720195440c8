// Attention with a soft cap on scores in ATen operations, which ATen's fused attention lacks. On
// any device and in any floating-point type, with sums in float32 or wider. Temporary memory is for
// a bounded number of scores (partial_attention.h).
#ifndef TANDEM_COMMON_OPS_ATTENTION_CAPPED_ATTENTION_H_
#define TANDEM_COMMON_OPS_ATTENTION_CAPPED_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/ops/attention/attention_gradients.h"
#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/shared_prefixes.h"
#include "common/ops/linear/row_chunks.h"

namespace tandem::ops {

// Returns the attention of the rows of a chunk: q [rows, heads, D], k [keys, kv_heads, D] and
// v [keys, kv_heads, Dv] -> [rows, heads * Dv].
at::Tensor CappedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const RowChunk& chunk, const AttentionScores& scores);

// Returns the gradients of causal attention within sequences, as those of
// AtenCausalAttentionBackward.
AttentionGradients CappedAttentionBackward(const at::Tensor& dy, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const std::vector<int64_t>& offsets,
                                           const AttentionScores& scores,
                                           const SharedPrefixes* prefixes = nullptr);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_CAPPED_ATTENTION_H_
