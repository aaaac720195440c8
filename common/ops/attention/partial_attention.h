// Attention of rows to some of their keys, whose results merge into attention to all keys: a step
// of ring attention, and the attention with a soft cap of aten_attention.h. In ATen, so it runs on
// any device.
//
// Layouts, all contiguous in their last dimension: G key/value heads, M query heads for each of
// them, R rows, K keys, none of them 0.
//   rows [G, R, M, D]      queries and their gradients
//   outputs [G, R, M, Dv]  outputs and their gradients
//   sums [G, R, M, 1]      a number for each row and query head
//   pair [G, K, D + Dv]    keys and values side by side, or [G, K, D]: the first Dv columns of keys
//                          are the values
// Inputs are of any floating-point type; a GPU multiplies them in it. Sums are of SumType.
// Temporary memory is for a bounded number of scores.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PARTIAL_ATTENTION_H_
#define TANDEM_COMMON_OPS_ATTENTION_PARTIAL_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ops/attention/attention_scores.h"

namespace tandem::ops {

// Returns the type in which sums are taken: float32 for bfloat16, else the type itself.
at::ScalarType SumType(at::ScalarType type);

// Converts x [T, heads, D] to [G, T, heads / G, D], and back.
at::Tensor GroupHeads(const at::Tensor& x, int64_t groups);
at::Tensor UngroupHeads(const at::Tensor& x);

// The outputs of rows over the keys seen so far, and the logarithms of the sums of the exponentials
// of their scores: 0 and -infinity before the first key. Both of SumType.
struct AttentionSum {
  at::Tensor output;   // outputs
  at::Tensor log_sum;  // sums
};

// Returns the sum of rows [G, R, M, D] before the first key, for values of width `value_dim`.
AttentionSum NoAttention(const at::Tensor& rows, int64_t value_dim);

// The scores of rows and keys: those of `scores`, of which a row may see no more than some.
struct PartialScores {
  AttentionScores scores = {};
  // Whether row r sees keys 0 .. K - R + r of its window, so that the last row sees all of them;
  // else a row sees all keys of its window.
  bool causal = false;
  at::Tensor row_positions = {},
             key_positions = {};  // [R] and [K] int64; undefined without a window
};

// Merges the attention of `q` to the keys of `pair` into `sum`, of the same rows. With l = log_sum,
// and with o' and l' for these keys alone,
//   l_new = log(e^l + e^l'),   o_new = e^(l - l_new) o + e^(l' - l_new) o'
// (https://arxiv.org/abs/2310.01889). A row that sees none of the keys must have seen others
// before.
void AddAttention(const at::Tensor& q, const at::Tensor& pair, const PartialScores& scores,
                  const AttentionSum& sum);

// The values of rows that their gradients need.
struct AttentionRows {
  at::Tensor q;        // rows
  at::Tensor dy;       // outputs: the gradient of the output
  at::Tensor log_sum;  // sums over all keys, in SumType
  at::Tensor delta;    // sums of dy * output over Dv, in SumType
};

// Adds the gradients of the attention of `rows` to the keys of `pair` to `dq` (rows) and `dpair`
// (pair), both of SumType:
//   p = e^(s - log_sum),  dv = p^T dy,  ds = p (dy v^T - delta),  dq = ds k,  dk = ds^T q
// (https://arxiv.org/abs/2205.14135, appendix B.2), with the scores s of AddAttention, and where
// they have a soft cap with ds times 1 - (s / soft_cap)^2.
void AddAttentionGradients(const AttentionRows& rows, const at::Tensor& pair,
                           const PartialScores& scores, const at::Tensor& dq,
                           const at::Tensor& dpair);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PARTIAL_ATTENTION_H_
