// The rows of hidden states that the experts of a layer read, sorted by expert.
#ifndef TANDEM_COMMON_OPS_EXPERT_ROWS_H_
#define TANDEM_COMMON_OPS_EXPERT_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// The order of N = T k rows, one for each choice of an expert by a token: sorted by expert, and by
// token within an expert.
struct ExpertRows {
  // `experts` [T, k] int64: the experts of each token, all different, from [0, num_experts).
  // Throws c10::Error for others.
  static ExpertRows Of(const at::Tensor& experts, int64_t num_experts);

  std::vector<int64_t> offsets;  // [num_experts + 1]: where the rows of an expert begin
  at::Tensor tokens;             // [N] int64: the token of each row
  at::Tensor rows;               // [T, k] int64: the row of each choice
};

// Returns the hidden states x [T, H] of every row's token: [N, H]. Differentiable.
at::Tensor GatherExpertRows(const at::Tensor& x, const ExpertRows& order);

// Returns for each token the sum of its rows of `outputs` [N, H], weighted by `weights` [T, k]
// (float32): [T, H] in the type of `outputs`. Sums are float32, in the order of the choices, so
// that the bits of a token depend on its own rows alone. Differentiable.
at::Tensor CombineExpertRows(const at::Tensor& outputs, const at::Tensor& weights,
                             const ExpertRows& order);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_EXPERT_ROWS_H_
