// Attention of many sequences without padding in one operation of a GPU: FlashAttention
// (https://arxiv.org/abs/2307.08691), as libtorch has it.
#ifndef TANDEM_COMMON_OPS_ATTENTION_VARLEN_ATTENTION_H_
#define TANDEM_COMMON_OPS_ATTENTION_VARLEN_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ops/attention/attention_gradients.h"
#include "common/ops/attention/attention_scores.h"

namespace tandem::ops {

// S sequences, which lie one behind the other. Sequence s has the rows [row_offsets[s],
// row_offsets[s + 1]) and the keys [key_offsets[s], key_offsets[s + 1]), at least as many; its last
// row is that of its last key.
struct VarlenSequences {
  at::Tensor row_offsets, key_offsets;  // [S + 1] int32, on the device
  int64_t longest_rows = 0, longest_keys = 0;
};

// Whether VarlenAttention takes queries like `q`: bfloat16 on a GPU, of at most 256 columns,
// without a soft cap.
bool HasVarlenAttention(const at::Tensor& q, const AttentionScores& scores);

// Causal attention within each sequence. q [T, heads, D], k [K, kv_heads, D], v [K, kv_heads, Dv],
// Dv <= D, all of one type -> [T, heads * Dv]. Differentiable.
at::Tensor VarlenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const VarlenSequences& sequences, const AttentionScores& scores);

// Returns the gradients of VarlenAttention for the gradient dy [T, heads * Dv] of the result, from
// a second pass forward.
AttentionGradients VarlenAttentionBackward(const at::Tensor& dy, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const VarlenSequences& sequences,
                                           const AttentionScores& scores);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_VARLEN_ATTENTION_H_
