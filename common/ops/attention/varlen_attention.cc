#include "common/ops/attention/varlen_attention.h"

#include <ATen/ATen.h>

#include <tuple>

#include "common/ops/attention/pad_columns.h"

namespace tandem::ops {
namespace {

// The kernels take widths that are multiples of the first, up to the second.
constexpr int64_t kWidthUnit = 8, kMaxWidth = 256;

// Returns x [T, heads, width] as the kernels read it: columns that it lacks are 0, every row of a
// head begins at a multiple of 16 bytes, and its numbers are contiguous.
at::Tensor Operand(const at::Tensor& x, int64_t width) {
  const at::Tensor padded = PadColumns(x, width);
  const bool is_aligned = padded.stride(2) == 1 && padded.stride(0) % kWidthUnit == 0 &&
                          padded.stride(1) % kWidthUnit == 0 &&
                          padded.storage_offset() % kWidthUnit == 0;
  return is_aligned ? padded : padded.contiguous();
}

}  // namespace

bool HasVarlenAttention(const at::Tensor& q, const AttentionScores& scores) {
  return q.is_cuda() && q.scalar_type() == at::kBFloat16 && q.size(2) <= kMaxWidth &&
         !scores.soft_cap.has_value();
}

at::Tensor VarlenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const VarlenSequences& sequences, const AttentionScores& scores) {
  const int64_t width = (q.size(2) + kWidthUnit - 1) / kWidthUnit * kWidthUnit;
  // A window is given in place of causality: the keys to the left and right of a row's own.
  const bool has_window = scores.window < sequences.longest_keys;
  const int64_t left = has_window ? scores.window - 1 : -1, right = has_window ? 0 : -1;
  const at::Tensor output = std::get<0>(at::_flash_attention_forward(
      Operand(q, width), Operand(k, width), Operand(v, width), sequences.row_offsets,
      sequences.key_offsets, sequences.longest_rows, sequences.longest_keys, /*dropout_p=*/0.0,
      /*is_causal=*/!has_window, /*return_debug_mask=*/false, scores.ScaleOf(q.size(2)), left,
      right));
  return output.narrow(2, 0, v.size(2)).reshape({q.size(0), q.size(1) * v.size(2)});
}

}  // namespace tandem::ops
