#include "common/ops/aten_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstddef>

namespace tandem::ops {
namespace {

// Repeats each key/value head of x [T, kv_heads, D] for the query heads that share it: ATen's fused
// kernels need equal numbers of heads.
at::Tensor RepeatHeads(const at::Tensor& x, int64_t heads) {
  const int64_t key_value_heads = x.size(1);
  if (heads == key_value_heads) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), key_value_heads, heads / key_value_heads, x.size(2)})
      .reshape({x.size(0), heads, x.size(2)});
}

// Attention of the last rows of one sequence to the whole sequence: q [rows, heads, D], k and v
// [length, kv_heads, D] -> [rows, heads * D].
at::Tensor AtenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t rows = q.size(0), heads = q.size(1), length = k.size(0);
  const bool is_causal = rows == length;
  c10::optional<at::Tensor> mask;
  if (!is_causal && rows > 1) {  // row r attends to the keys up to its own
    mask = at::ones({rows, length}, q.options().dtype(at::kBool)).tril_(length - rows);
  }
  const auto batched = [](const at::Tensor& x) {  // [1, heads, length, D]
    return x.transpose(0, 1).unsqueeze(0);
  };
  return at::scaled_dot_product_attention(batched(q), batched(RepeatHeads(k, heads)),
                                          batched(RepeatHeads(v, heads)), mask, /*dropout_p=*/0.0,
                                          is_causal)
      .squeeze(0)
      .transpose(0, 1)
      .reshape({rows, heads * q.size(2)});
}

at::Tensor JoinRows(const std::vector<at::Tensor>& outputs, const at::Tensor& q) {
  if (outputs.empty()) return q.reshape({0, q.size(1) * q.size(2)});
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 0);
}

}  // namespace

at::Tensor AtenCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets) {
  std::vector<at::Tensor> outputs;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const int64_t begin = offsets[s], length = offsets[s + 1] - begin;
    if (length == 0) continue;
    outputs.push_back(AtenAttention(q.narrow(0, begin, length), k.narrow(0, begin, length),
                                    v.narrow(0, begin, length)));
  }
  return JoinRows(outputs, q);
}

at::Tensor AtenCachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                               const at::Tensor& key_cache, const at::Tensor& value_cache) {
  const int64_t block_tokens = key_cache.size(2);
  std::vector<at::Tensor> outputs;
  for (size_t s = 0; s < sequences.starts.size(); ++s) {
    const int64_t begin = offsets[s], rows = offsets[s + 1] - begin;
    if (rows == 0) continue;
    const int64_t start = sequences.starts[s], end = start + rows;
    const at::Tensor table = sequences.block_table.select(0, static_cast<int64_t>(s))
                                 .narrow(0, 0, (end + block_tokens - 1) / block_tokens);
    const at::Tensor positions = at::arange(start, end, table.options().dtype(at::kLong));
    const at::Tensor blocks =
        table.index_select(0, positions.div(block_tokens, "floor")).to(at::kLong);
    const at::Tensor places = positions.remainder(block_tokens);
    const auto appended = [&](const at::Tensor& cache, const at::Tensor& x) {
      const at::Tensor by_position = cache.transpose(1, 2);  // [blocks, tokens, kv_heads, D]
      by_position.index_put_({blocks, places}, x.narrow(0, begin, rows).to(cache.scalar_type()));
      return by_position.index_select(0, table).flatten(0, 1).narrow(0, 0, end).to(q.scalar_type());
    };
    outputs.push_back(
        AtenAttention(q.narrow(0, begin, rows), appended(key_cache, k), appended(value_cache, v)));
  }
  return JoinRows(outputs, q);
}

// Divides the work by sequence and key/value head. Operations of ATen on whole batches, each of
// which would wake the threads, are many times slower on short sequences.
AttentionGradients AtenCausalAttentionBackward(const at::Tensor& dy_in, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const std::vector<int64_t>& offsets) {
  const at::Tensor dy = dy_in.view(q.sizes());
  AttentionGradients d = {at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                          at::empty(v.sizes(), v.options())};
  const int64_t key_value_heads = k.size(1), group = q.size(1) / key_value_heads;
  const auto run = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / key_value_heads, head = item % key_value_heads;
      const int64_t row = offsets[s], length = offsets[s + 1] - row;
      if (length == 0) continue;
      const auto of_item = [&](const at::Tensor& x, int64_t heads) {  // [1, heads, length, D]
        return x.narrow(0, row, length).narrow(1, head * heads, heads).transpose(0, 1).unsqueeze(0);
      };
      const auto shared = [&](const at::Tensor& x) {
        return of_item(x, 1).expand({1, group, length, x.size(2)});
      };
      const at::Tensor qi = of_item(q, group), ki = shared(k), vi = shared(v);
      const auto [y, log_sum] =
          at::_scaled_dot_product_flash_attention_for_cpu(qi, ki, vi, /*dropout_p=*/0.0,
                                                          /*is_causal=*/true);
      const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          of_item(dy, group), qi, ki, vi, y, log_sum, /*dropout_p=*/0.0, /*is_causal=*/true);
      of_item(d.q, group).copy_(dq);
      of_item(d.k, 1).copy_(dk.sum(1, /*keepdim=*/true));
      of_item(d.v, 1).copy_(dv.sum(1, /*keepdim=*/true));
    }
  };
  at::parallel_for(0, (static_cast<int64_t>(offsets.size()) - 1) * key_value_heads, 1, run);
  return d;
}

}  // namespace tandem::ops
