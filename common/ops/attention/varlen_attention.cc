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

// A call of libtorch's kernels.
class Call {
 public:
  Call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
       const VarlenSequences& sequences, const AttentionScores& scores)
      : width_((q.size(2) + kWidthUnit - 1) / kWidthUnit * kWidthUnit),
        q_(Operand(q, width_)),
        k_(Operand(k, width_)),
        v_(Operand(v, width_)),
        sequences_(sequences),
        has_window_(scores.window < sequences.longest_keys),
        left_(has_window_ ? scores.window - 1 : -1),
        right_(has_window_ ? 0 : -1),
        scale_(scores.ScaleOf(q.size(2))) {}

  // Returns the output [T, heads, width_], the logarithms of the sums, and the state of dropout.
  auto Forward() const {
    return at::_flash_attention_forward(q_, k_, v_, sequences_.row_offsets, sequences_.key_offsets,
                                        sequences_.longest_rows, sequences_.longest_keys,
                                        /*dropout_p=*/0.0, /*is_causal=*/!has_window_,
                                        /*return_debug_mask=*/false, scale_, left_, right_);
  }

  // Returns the gradients of the operands, [.., width_] each.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> Backward(const at::Tensor& dy) const {
    const auto [output, log_sums, random_state, unused, mask] = Forward();
    return at::_flash_attention_backward(
        Operand(dy, width_), q_, k_, v_, output, log_sums, sequences_.row_offsets,
        sequences_.key_offsets, sequences_.longest_rows, sequences_.longest_keys,
        /*dropout_p=*/0.0, /*is_causal=*/!has_window_, random_state, unused, scale_, left_, right_);
  }

 private:
  const int64_t width_;
  const at::Tensor q_, k_, v_;
  const VarlenSequences& sequences_;
  // A window is given in place of causality: the keys to the left and right of a row's own.
  const bool has_window_;
  const int64_t left_, right_;
  const double scale_;
};

}  // namespace

bool HasVarlenAttention(const at::Tensor& q, const AttentionScores& scores) {
  return q.is_cuda() && q.scalar_type() == at::kBFloat16 && q.size(2) <= kMaxWidth &&
         !scores.soft_cap.has_value();
}

at::Tensor VarlenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const VarlenSequences& sequences, const AttentionScores& scores) {
  const at::Tensor output = std::get<0>(Call(q, k, v, sequences, scores).Forward());
  return output.narrow(2, 0, v.size(2)).reshape({q.size(0), q.size(1) * v.size(2)});
}

AttentionGradients VarlenAttentionBackward(const at::Tensor& dy, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const VarlenSequences& sequences,
                                           const AttentionScores& scores) {
  const auto [dq, dk, dv] =
      Call(q, k, v, sequences, scores).Backward(dy.reshape({q.size(0), q.size(1), v.size(2)}));
  return {.q = dq.narrow(2, 0, q.size(2)),
          .k = dk.narrow(2, 0, k.size(2)),
          .v = dv.narrow(2, 0, v.size(2))};
}

}  // namespace tandem::ops
