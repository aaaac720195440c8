// FlashAttention as libtorch has it on a GPU alone: sequences without padding, one behind the
// other.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>

#include "tests/gpu/simulated/host_bytes.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

using at::Tensor;

// Throws c10::Error for operands that the kernels refuse.
void CheckOperands(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& row_offsets,
                   const Tensor& key_offsets) {
  for (const Tensor& x : {q, k, v}) {
    TORCH_CHECK(x.is_cuda() && x.scalar_type() == at::kBFloat16,
                "flash attention: ", x.scalar_type(), " on ", x.device());
    TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "flash attention: columns are not contiguous");
    TORCH_CHECK(x.size(2) == q.size(2) && x.size(2) % 8 == 0 && x.size(2) <= 256,
                "flash attention: ", x.size(2), " columns");
    TORCH_CHECK(x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 && x.storage_offset() % 8 == 0,
                "flash attention: rows are not aligned to 16 bytes");
  }
  TORCH_CHECK(row_offsets.numel() > 1, "batch size must be positive");
  TORCH_CHECK(q.size(1) % k.size(1) == 0 && k.size(1) == v.size(1) && k.size(0) == v.size(0),
              "flash attention: heads or keys do not fit");
  for (const Tensor& offsets : {row_offsets, key_offsets}) {
    TORCH_CHECK(offsets.is_cuda() && offsets.scalar_type() == at::kInt && offsets.is_contiguous(),
                "flash attention: offsets must be int32 on the device");
  }
}

// One sequence: its rows and keys, and which keys a row sees.
struct Sequence {
  int64_t row, rows, key, keys;
  Tensor hidden;  // [rows, keys]
};

struct Window {
  bool is_causal;
  std::optional<int64_t> left, right;
};

// Calls fn(sequence) for each that has rows.
template <typename Function>
void ForEachSequence(const Tensor& row_offsets, const Tensor& key_offsets, int64_t longest_rows,
                     int64_t longest_keys, const Window& window, const Function& fn) {
  const Tensor row_limits = OnCpu(row_offsets), key_limits = OnCpu(key_offsets);
  const auto* const row = row_limits.const_data_ptr<int32_t>();
  const auto* const key = key_limits.const_data_ptr<int32_t>();
  for (int64_t s = 0; s + 1 < row_limits.numel(); ++s) {
    Sequence sequence = {.row = row[s],
                         .rows = row[s + 1] - row[s],
                         .key = key[s],
                         .keys = key[s + 1] - key[s],
                         .hidden = {}};
    TORCH_CHECK(sequence.rows <= longest_rows && sequence.keys <= longest_keys,
                "flash attention: a sequence is longer than the longest");
    if (sequence.rows == 0) continue;
    // The last row is that of the last key.
    const Tensor at_row = at::arange(sequence.rows).add(sequence.keys - sequence.rows).unsqueeze(1);
    const Tensor at_key = at::arange(sequence.keys).unsqueeze(0);
    sequence.hidden = at::zeros({sequence.rows, sequence.keys}, at::kBool);
    const auto hide = [&](const Tensor& keys) { sequence.hidden.logical_or_(keys); };
    if (window.is_causal) hide(at_key > at_row);
    if (window.left.value_or(-1) >= 0) hide(at_key < at_row - *window.left);
    if (window.right.value_or(-1) >= 0) hide(at_key > at_row + *window.right);
    fn(sequence);
  }
}

// Returns the rows [begin, begin + count) of x as [heads, rows, D] float32, heads repeated.
Tensor Heads(const Tensor& x, int64_t begin, int64_t count, int64_t heads) {
  return x.narrow(0, begin, count)
      .to(at::kFloat)
      .transpose(0, 1)
      .repeat_interleave(heads / x.size(1), 0);
}

Tensor Scores(const Tensor& q, const Tensor& k, const Sequence& sequence, double scale) {
  return at::matmul(q, k.transpose(1, 2))
      .mul(scale)
      .masked_fill(sequence.hidden, -std::numeric_limits<double>::infinity());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> Forward(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const std::optional<Tensor>& row_offsets, const std::optional<Tensor>& key_offsets,
    int64_t longest_rows, int64_t longest_keys, double /*dropout*/, bool is_causal,
    bool /*return_debug_mask*/, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right, const std::optional<Tensor>& /*used_keys*/,
    const std::optional<Tensor>& /*slopes*/) {
  CheckOperands(q_in, k_in, v_in, *row_offsets, *key_offsets);
  const at::DisableRecordFunctionGuard unseen;
  const Tensor q = OnCpu(q_in), k = OnCpu(k_in), v = OnCpu(v_in);
  const int64_t heads = q.size(1);
  Tensor output = at::empty_like(q_in);
  Tensor log_sums = at::empty({heads, q.size(0)}, q_in.options().dtype(at::kFloat));
  Launch({q_in, k_in, v_in, *row_offsets, *key_offsets}, {output, log_sums});
  ForEachSequence(*row_offsets, *key_offsets, longest_rows, longest_keys,
                  {.is_causal = is_causal, .left = left, .right = right}, [&](const Sequence& s) {
                    const Tensor scores = Scores(Heads(q, s.row, s.rows, heads),
                                                 Heads(k, s.key, s.keys, heads), s, *scale);
                    const Tensor y =
                        at::matmul(at::softmax(scores, -1), Heads(v, s.key, s.keys, heads));
                    OnCpu(output).narrow(0, s.row, s.rows).copy_(y.transpose(0, 1));
                    OnCpu(log_sums).narrow(1, s.row, s.rows).copy_(at::logsumexp(scores, {-1}));
                  });
  const auto random = q_in.options().dtype(at::kUInt64);
  return {output, log_sums, at::empty({2}, random), at::empty({}, random),
          at::empty({0}, q_in.options())};
}

std::tuple<Tensor, Tensor, Tensor> Backward(
    const Tensor& dy_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& output_in, const Tensor& log_sums_in, const Tensor& row_offsets,
    const Tensor& key_offsets, int64_t longest_rows, int64_t longest_keys, double /*dropout*/,
    bool is_causal, const Tensor& /*random_state*/, const Tensor& /*unused*/,
    std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t> right) {
  CheckOperands(q_in, k_in, v_in, row_offsets, key_offsets);
  const at::DisableRecordFunctionGuard unseen;
  const Tensor q = OnCpu(q_in), k = OnCpu(k_in), v = OnCpu(v_in), dy = OnCpu(dy_in);
  const Tensor output = OnCpu(output_in), log_sums = OnCpu(log_sums_in);
  const int64_t heads = q.size(1);
  const Tensor dq = at::zeros_like(q_in), dk = at::zeros_like(k_in), dv = at::zeros_like(v_in);
  Launch({dy_in, q_in, k_in, v_in, output_in, log_sums_in, row_offsets, key_offsets}, {dq, dk, dv});
  ForEachSequence(
      row_offsets, key_offsets, longest_rows, longest_keys,
      {.is_causal = is_causal, .left = left, .right = right}, [&](const Sequence& s) {
        const Tensor qs = Heads(q, s.row, s.rows, heads), ks = Heads(k, s.key, s.keys, heads);
        const Tensor dys = Heads(dy, s.row, s.rows, heads);
        const Tensor p =
            (Scores(qs, ks, s, *scale) - log_sums.narrow(1, s.row, s.rows).unsqueeze(2)).exp();
        const Tensor delta = (dys * Heads(output, s.row, s.rows, heads)).sum(-1, /*keepdim=*/true);
        const Tensor ds =
            p * (at::matmul(dys, Heads(v, s.key, s.keys, heads).transpose(1, 2)) - delta) * *scale;
        // Sums over the query heads that share a key/value head.
        const auto add = [&](const Tensor& to, const Tensor& gradient) {
          OnCpu(to)
              .narrow(0, s.key, s.keys)
              .copy_(
                  gradient.unflatten(0, {to.size(1), heads / to.size(1)}).sum(1).transpose(0, 1));
        };
        OnCpu(dq).narrow(0, s.row, s.rows).copy_(at::matmul(ds, ks).transpose(0, 1));
        add(dk, at::matmul(ds.transpose(1, 2), qs));
        add(dv, at::matmul(p.transpose(1, 2), dys));
      });
  return {dq, dk, dv};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_flash_attention_forward", &Forward);
  library.impl("_flash_attention_backward", &Backward);
}

}  // namespace
}  // namespace tandem::simulated_gpu
