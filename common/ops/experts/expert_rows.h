// The rows of hidden states that the experts of a layer read, sorted by expert.
#ifndef TANDEM_COMMON_OPS_EXPERTS_EXPERT_ROWS_H_
#define TANDEM_COMMON_OPS_EXPERTS_EXPERT_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// The order of N rows, one for each choice of an expert by a token: sorted by expert, and by token
// within an expert.
struct ExpertRows {
  // `experts` [T, k] int64: the experts of each token, all different, from [0, num_experts).
  // Throws c10::Error for others. N = T k.
  static ExpertRows Of(const at::Tensor& experts, int64_t num_experts);
  // The rows of the `count` experts from `first` on alone; offsets[i] is that of expert first + i.
  static ExpertRows OfRange(const at::Tensor& experts, int64_t num_experts, int64_t first,
                            int64_t count);

  // The order of OfRange, made on the device of `experts` without a wait of the host, which
  // therefore does not check them and does not know N: there are T k rows, and those of other
  // experts come last. No gradient.
  static ExpertRows OnDevice(const at::Tensor& experts, int64_t num_experts, int64_t first,
                             int64_t count);

  std::vector<int64_t> offsets;  // [count + 1]: where the rows of an expert begin
  at::Tensor device_offsets;     // after OnDevice the same on the device as int32, in its place
  at::Tensor tokens;             // [N] int64: the token of each row
  at::Tensor rows;               // [T, k] int64: the row of each choice; -1: the choice has none
  bool is_complete = true;       // whether every choice has a row
};

// Returns the hidden states x [T, H] of every row's token: [N, H]. Differentiable.
at::Tensor GatherExpertRows(const at::Tensor& x, const ExpertRows& order);

// Returns for each token the sum of its rows of `outputs` [N, H], weighted by `weights` [T, k]
// (float32): [T, H] in the type of `outputs`. Sums are float32, in the order of the choices, so
// that the bits of a token depend on its own rows alone; a choice without a row adds nothing.
// Differentiable if every choice has a row; else throws c10::NotImplementedError with autograd.
at::Tensor CombineExpertRows(const at::Tensor& outputs, const at::Tensor& weights,
                             const ExpertRows& order);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_EXPERTS_EXPERT_ROWS_H_
