#include "common/ops/attention/varlen_attention.h"

#include <ATen/ATen.h>

#include <tuple>

#include "common/ops/attention/pad_columns.h"

namespace tandem::ops {
namespace {

// What the kernels take: multiples of the first up to the second.
constexpr int64_t kWidthUnit = 8, kMaxWidth = 256;

}  // namespace

bool HasVarlenAttention(const at::Tensor& q, const AttentionScores& scores) {
  return q.is_cuda() && q.scalar_type() == at::kBFloat16 && q.size(2) <= kMaxWidth &&
         !scores.soft_cap.has_value();
}

at::Tensor VarlenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const VarlenSequences& sequences, const AttentionScores& scores) {
  const int64_t width = (q.size(2) + kWidthUnit - 1) / kWidthUnit * kWidthUnit;
  // A window is given in place of causality: the keys before and behind a row's own.
  const bool has_window = scores.window < sequences.longest_keys;
  const int64_t before = has_window ? scores.window - 1 : -1, behind = has_window ? 0 : -1;
  const at::Tensor output = std::get<0>(at::_flash_attention_forward(
      PadColumns(q, width), PadColumns(k, width), PadColumns(v, width), sequences.row_offsets,
      sequences.key_offsets, sequences.longest_rows, sequences.longest_keys, /*dropout_p=*/0.0,
      /*is_causal=*/!has_window, /*return_debug_mask=*/false, scores.ScaleOf(q.size(2)), before,
      behind));
  return output.narrow(2, 0, v.size(2)).reshape({q.size(0), q.size(1) * v.size(2)});
}

}  // namespace tandem::ops
