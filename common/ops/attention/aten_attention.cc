#include "common/ops/attention/aten_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstddef>

#include "common/ops/linear/row_chunks.h"

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

// Returns x [.., width] with zeros up to `width`: the fused kernels of ATen need values as wide as
// keys, and the columns of the result that belong to zeros are left out.
at::Tensor PadColumns(const at::Tensor& x, int64_t width) {
  return x.size(-1) == width ? x : at::constant_pad_nd(x, {0, width - x.size(-1)});
}

// Attention of the rows of a chunk: q [rows, heads, D], k [keys, kv_heads, D] and
// v [keys, kv_heads, Dv] -> [rows, heads * Dv].
at::Tensor AtenAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const RowChunk& chunk, const AttentionScores& scores) {
  if (scores.soft_cap.has_value()) return CappedAttention(q, k, v, chunk, scores);
  const int64_t rows = q.size(0), heads = q.size(1);
  const auto batched = [](const at::Tensor& x) {  // [1, heads, length, D]
    return x.transpose(0, 1).unsqueeze(0);
  };
  return at::scaled_dot_product_attention(batched(q), batched(RepeatHeads(k, heads)),
                                          batched(RepeatHeads(PadColumns(v, q.size(2)), heads)),
                                          chunk.Mask(q.options()),
                                          /*dropout_p=*/0.0, chunk.is_causal(), scores.scale)
      .squeeze(0)
      .transpose(0, 1)
      .narrow(2, 0, v.size(2))
      .reshape({rows, heads * v.size(2)});
}

at::Tensor JoinRows(const std::vector<at::Tensor>& outputs, const at::Tensor& q,
                    const at::Tensor& v) {
  if (outputs.empty()) return at::empty({0, q.size(1) * v.size(2)}, q.options());
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 0);
}

}  // namespace

at::Tensor AtenCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const AttentionScores& scores) {
  std::vector<at::Tensor> outputs;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const int64_t begin = offsets[s], length = offsets[s + 1] - begin;
    if (length == 0) continue;
    for (const RowChunk& chunk : RowChunks(0, length, scores.window)) {
      outputs.push_back(AtenAttention(q.narrow(0, begin + chunk.row, chunk.rows),
                                      k.narrow(0, begin + chunk.key, chunk.keys),
                                      v.narrow(0, begin + chunk.key, chunk.keys), chunk, scores));
    }
  }
  return JoinRows(outputs, q, v);
}

at::Tensor AtenCachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                               const at::Tensor& key_cache, const at::Tensor& value_cache,
                               const AttentionScores& scores) {
  const int64_t block_tokens = key_cache.size(2);
  std::vector<at::Tensor> outputs;
  for (size_t s = 0; s < sequences.starts.size(); ++s) {
    const int64_t begin = offsets[s], rows = offsets[s + 1] - begin;
    if (rows == 0) continue;
    const int64_t start = sequences.starts[s], end = start + rows;
    const int64_t first_block = FirstKey(start, scores.window) / block_tokens;
    const int64_t first_key = first_block * block_tokens;
    const at::Tensor table = sequences.block_table.select(0, static_cast<int64_t>(s))
                                 .slice(0, first_block, (end + block_tokens - 1) / block_tokens);
    const at::Tensor places =
        at::arange(start - first_key, end - first_key, table.options().dtype(at::kLong));
    const at::Tensor blocks =
        table.index_select(0, places.div(block_tokens, "floor")).to(at::kLong);
    const auto appended = [&](const at::Tensor& cache, const at::Tensor& x) {
      const at::Tensor by_position = cache.transpose(1, 2);  // [blocks, tokens, kv_heads, D]
      by_position.index_put_({blocks, places.remainder(block_tokens)},
                             x.narrow(0, begin, rows).to(cache.scalar_type()));
      return by_position.index_select(0, table).flatten(0, 1).to(q.scalar_type());
    };
    const at::Tensor keys = appended(key_cache, k), values = appended(value_cache, v);
    for (const RowChunk& chunk : RowChunks(start, end, scores.window)) {
      const int64_t key = chunk.key - first_key;
      outputs.push_back(AtenAttention(q.narrow(0, begin + chunk.row - start, chunk.rows),
                                      keys.narrow(0, key, chunk.keys),
                                      values.narrow(0, key, chunk.keys), chunk, scores));
    }
  }
  return JoinRows(outputs, q, v);
}

// Divides the work by sequence, key/value head, and the query heads that share it. Operations of
// ATen on whole batches, each of which would wake the threads, are many times slower on short
// sequences.
AttentionGradients AtenCausalAttentionBackward(const at::Tensor& dy_in, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const std::vector<int64_t>& offsets,
                                               const AttentionScores& scores) {
  if (scores.soft_cap.has_value()) return CappedAttentionBackward(dy_in, q, k, v, offsets, scores);
  // The query heads of an item repeat its keys that many times.
  constexpr int64_t kHeadsPerItem = 8;
  const int64_t key_value_heads = k.size(1), group = q.size(1) / key_value_heads;
  const int64_t head_dim = q.size(2), value_dim = v.size(2);
  const at::Tensor dy = dy_in.view({q.size(0), q.size(1), value_dim});
  const int64_t splits = (group + kHeadsPerItem - 1) / kHeadsPerItem;
  // The gradients of keys and values have a sum for each split, [splits, T, kv_heads, D].
  const auto sums = [&](const at::Tensor& x) {
    return at::zeros({splits, x.size(0), x.size(1), x.size(2)}, x.options());
  };
  const at::Tensor dq = at::empty(q.sizes(), q.options()), dk = sums(k), dv = sums(v);
  const auto run = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread
    for (int64_t item = begin; item < end; ++item) {
      const int64_t split = item % splits, head = item / splits % key_value_heads;
      const int64_t s = item / splits / key_value_heads;
      const int64_t row = offsets[s], length = offsets[s + 1] - row;
      const int64_t first_head = head * group + split * kHeadsPerItem;
      const int64_t heads = std::min(kHeadsPerItem, group - split * kHeadsPerItem);
      for (const RowChunk& chunk : RowChunks(0, length, scores.window)) {
        const auto rows = [&](const at::Tensor& x) {  // [1, heads, rows, D]
          return x.narrow(0, row + chunk.row, chunk.rows)
              .narrow(1, first_head, heads)
              .transpose(0, 1)
              .unsqueeze(0);
        };
        const auto keys = [&](const at::Tensor& x) {  // [1, 1, keys, D]
          return x.narrow(0, row + chunk.key, chunk.keys)
              .narrow(1, head, 1)
              .transpose(0, 1)
              .unsqueeze(0);
        };
        const auto shared = [&](const at::Tensor& x) {
          return keys(x).expand({1, heads, chunk.keys, x.size(2)});
        };
        const c10::optional<at::Tensor> mask = chunk.Mask(q.options());
        const at::Tensor qi = rows(q), ki = shared(k);
        const at::Tensor vi =
            value_dim == head_dim
                ? shared(v)
                : PadColumns(keys(v), head_dim).expand({1, heads, chunk.keys, head_dim});
        const auto [y, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
            qi, ki, vi, /*dropout_p=*/0.0, chunk.is_causal(), mask, scores.scale);
        const auto [dqi, dki, dvi] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            PadColumns(rows(dy), head_dim), qi, ki, vi, y, log_sum, /*dropout_p=*/0.0,
            chunk.is_causal(), mask, scores.scale);
        rows(dq).copy_(dqi);
        keys(dk[split]).add_(dki.sum(1, /*keepdim=*/true));
        keys(dv[split]).add_(dvi.sum(1, /*keepdim=*/true).narrow(3, 0, value_dim));
      }
    }
  };
  const int64_t sequences = static_cast<int64_t>(offsets.size()) - 1;
  at::parallel_for(0, sequences * key_value_heads * splits, 1, run);
  if (splits == 1) return {dq, dk[0], dv[0]};
  return {dq, dk.sum(0), dv.sum(0)};
}

}  // namespace tandem::ops
