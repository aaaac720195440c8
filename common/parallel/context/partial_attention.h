// Attention of rows to some of their keys, whose results merge into attention to all keys: the
// computation of one step of ring attention. In ATen, so it runs on any device.
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
#ifndef TANDEM_COMMON_PARALLEL_CONTEXT_PARTIAL_ATTENTION_H_
#define TANDEM_COMMON_PARALLEL_CONTEXT_PARTIAL_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "common/ops/attention_scores.h"

namespace tandem::parallel {

// Returns the type in which sums are taken: float32 for bfloat16, else the type itself.
at::ScalarType SumType(at::ScalarType type);

// The outputs of rows over the keys seen so far, and the logarithms of the sums of the exponentials
// of their scores: 0 and -infinity before the first key. Both of SumType.
struct AttentionSum {
  at::Tensor output;   // outputs
  at::Tensor log_sum;  // sums
};

// The scores of rows and keys: those of `scores`, of which a row may see no more than some.
struct PartialScores {
  ops::AttentionScores scores = {};
  // Whether R = K and row r sees keys 0 .. r of its window; else a row sees all keys of its window.
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
// (https://arxiv.org/abs/2205.14135, appendix B.2), with the scores s of AddAttention.
void AddAttentionGradients(const AttentionRows& rows, const at::Tensor& pair,
                           const PartialScores& scores, const at::Tensor& dq,
                           const at::Tensor& dpair);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_CONTEXT_PARTIAL_ATTENTION_H_
