#include "common/ops/attention/aten_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/ops/attention/gathered_keys.h"
#include "common/ops/attention/pad_columns.h"
#include "common/ops/attention/padded_sequences.h"
#include "common/ops/attention/shared_keys.h"
#include "common/ops/attention/varlen_attention.h"
#include "common/ops/linear/row_chunks.h"
#include "common/tensor/aten/device_copies.h"

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

// Attention of the rows of one sequence from position `start` on, whose keys and values are in the
// cache, into out [rows, heads * Dv].
void AttendSequence(const at::Tensor& q, int64_t start, const at::Tensor& block_table,
                    const at::Tensor& key_cache, const at::Tensor& value_cache,
                    const AttentionScores& scores, const at::Tensor& out) {
  const int64_t block_tokens = key_cache.size(2), end = start + q.size(0);
  const int64_t first_block = FirstKey(start, scores.window) / block_tokens;
  const int64_t first_key = first_block * block_tokens;
  const at::Tensor blocks =
      block_table.slice(0, first_block, (end + block_tokens - 1) / block_tokens);
  const auto gathered = [&](const at::Tensor& cache) {  // [keys, kv_heads, D]
    return cache.transpose(1, 2).index_select(0, blocks).flatten(0, 1).to(q.scalar_type());
  };
  const at::Tensor keys = gathered(key_cache), values = gathered(value_cache);
  for (const RowChunk& chunk : RowChunks(start, end, scores.window)) {
    const int64_t key = chunk.key - first_key, row = chunk.row - start;
    out.narrow(0, row, chunk.rows)
        .copy_(AtenAttention(q.narrow(0, row, chunk.rows), keys.narrow(0, key, chunk.keys),
                             values.narrow(0, key, chunk.keys), chunk, scores));
  }
}

// Returns the blocks that hold the keys of `rows` consecutive rows.
int64_t BlocksOfRows(int64_t rows, int64_t window, int64_t block_tokens) {
  return WindowBlocks(window == kNoWindow ? window : window + rows - 1, block_tokens);
}

// Attention of the rows of some sequences to the cache, into their rows of out [T, heads * Dv].
// Every query head of a row sees the same keys, so that those that share a key/value head are the
// rows of a product, for all rows of a sequence.
void AttendTogether(const at::Tensor& q, const RowsTogether& together,
                    const at::Tensor& block_table, const at::Tensor& key_cache,
                    const at::Tensor& value_cache, const AttentionScores& scores,
                    int64_t max_gathered, const at::Tensor& out) {
  const int64_t key_value_heads = key_cache.size(1), block_tokens = key_cache.size(2);
  const int64_t heads = q.size(1), head_dim = q.size(2), value_dim = value_cache.size(3);
  const int64_t rows_each = together.rows_each;
  const bool has_window = scores.window != kNoWindow;
  const int64_t columns =
      std::min(together.blocks, BlocksOfRows(rows_each, scores.window, block_tokens));
  const int64_t keys = columns * block_tokens, total = together.rows.size(0);
  // Scores fill memory where several rows attend.
  const int64_t of_sequence =
      std::max(keys * key_value_heads * head_dim, rows_each == 1 ? 0 : heads * rows_each * keys);
  const int64_t step = std::max<int64_t>(max_gathered / of_sequence, 1);
  for (int64_t begin = 0; begin < total; begin += step) {
    const int64_t count = std::min(step, total - begin);
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, count); };
    const at::Tensor first_positions = part(together.positions).unsqueeze(1);  // [N, 1]
    at::Tensor rows = part(together.rows), positions = first_positions;
    if (rows_each > 1) {  // a sequence with fewer rows repeats its last one
      const at::Tensor others = at::minimum(at::arange(rows_each, rows.options()),
                                            part(together.counts).unsqueeze(1) - 1);
      rows = (rows.unsqueeze(1) + others).flatten();  // [N R]
      positions = first_positions + others;           // [N, R]
    }
    at::Tensor block_columns = at::arange(columns, positions.options()).unsqueeze(0);
    if (has_window) {
      const at::Tensor first_keys = (first_positions - (scores.window - 1)).clamp_min(0);
      block_columns = block_columns + first_keys.div(block_tokens, "floor");
    }
    const at::Tensor blocks =
        block_table.index_select(0, part(together.sequences))
            .gather(1, block_columns.clamp_max(block_table.size(1) - 1).expand({count, columns}))
            .flatten();
    const at::Tensor key_positions =  // [N or 1, keys]
        (block_columns.unsqueeze(2) * block_tokens + at::arange(block_tokens, positions.options()))
            .flatten(1);
    // [N, R, keys]
    const at::Tensor of_keys = key_positions.unsqueeze(1), of_rows = positions.unsqueeze(2);
    at::Tensor seen = of_keys <= of_rows;
    if (has_window) seen = seen.logical_and_(of_keys > of_rows - scores.window);
    const at::Tensor by_any = rows_each == 1 ? seen : seen.any(1);
    const at::Tensor hidden = by_any.logical_not().view({count, 1, keys, 1});
    const auto gather = [&](const at::Tensor& cache) {  // [N, kv_heads, keys, D]
      return cache.transpose(0, 1)
          .index_select(1, blocks)
          .view({key_value_heads, count, keys, cache.size(3)})
          .transpose(0, 1)
          // Memory that nobody wrote may hold NaN, and 0 times NaN is NaN.
          .masked_fill_(hidden, 0)
          .to(q.scalar_type());
    };
    const int64_t group = heads / key_value_heads;
    const at::Tensor queries = q.index_select(0, rows)
                                   .view({count, rows_each, key_value_heads, group, head_dim})
                                   .transpose(1, 2)
                                   .reshape({count, key_value_heads, rows_each * group, head_dim});
    at::Tensor mask = seen.unsqueeze(1);  // [N, 1, R, keys]
    if (rows_each > 1) {
      mask = mask.unsqueeze(3)
                 .expand({count, 1, rows_each, group, keys})
                 .reshape({count, 1, rows_each * group, keys});
    }
    const at::Tensor result = at::scaled_dot_product_attention(
        queries, gather(key_cache), PadColumns(gather(value_cache), head_dim), mask,
        /*dropout_p=*/0.0, /*is_causal=*/false, scores.scale);
    out.index_copy_(0, rows,
                    result.narrow(3, 0, value_dim)
                        .reshape({count, key_value_heads, rows_each, group * value_dim})
                        .transpose(1, 2)
                        .reshape({count * rows_each, out.size(1)}));
  }
}

// CausalAttention of sequences on a GPU, those of about one length together. Differentiable, but
// with a soft cap.
at::Tensor AttendPadded(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::vector<int64_t>& offsets, const AttentionScores& scores) {
  const std::vector<PaddedSequences> parts =
      PadByLength(offsets, q.size(1), kGatheredNumbers, q.device());
  std::vector<at::Tensor> outputs;
  for (const PaddedSequences& part : parts) {
    const at::Tensor queries = part.Pad(q), keys = part.Pad(k), values = part.Pad(v);
    std::vector<at::Tensor> chunks;
    for (const RowChunk& chunk : RowChunks(0, part.rows, scores.window)) {
      chunks.push_back(AtenAttention(queries.narrow(0, chunk.row, chunk.rows),
                                     keys.narrow(0, chunk.key, chunk.keys),
                                     values.narrow(0, chunk.key, chunk.keys), chunk, scores));
    }
    outputs.push_back(part.Rows(chunks.size() == 1 ? chunks[0] : at::cat(chunks)));
  }
  if (parts.size() == 1) return outputs[0];
  // The place of each row of the batch among the outputs.
  std::vector<int64_t> places(static_cast<size_t>(q.size(0)));
  int64_t place = 0;
  for (const PaddedSequences& part : parts) {
    for (const auto& [begin, rows] : part.ranges) {
      for (int64_t row = begin; row < begin + rows; ++row) places[row] = place++;
    }
  }
  return at::cat(outputs).index_select(0, CopyToDevice(places, q.device()));
}

// The gradients of AttendPadded.
AttentionGradients AttendPaddedBackward(const at::Tensor& dy, const at::Tensor& q,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const std::vector<int64_t>& offsets,
                                        const AttentionScores& scores) {
  AttentionGradients gradients = {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  const at::Tensor by_head = dy.reshape({q.size(0), q.size(1), v.size(2)});
  for (const PaddedSequences& part :
       PadByLength(offsets, q.size(1), kGatheredNumbers, q.device())) {
    const AttentionGradients padded =
        CappedAttentionBackward(part.PadWithZeros(by_head), part.Pad(q), part.Pad(k), part.Pad(v),
                                {0, part.rows}, scores, /*prefixes=*/nullptr);
    part.CopyRows(padded.q, gradients.q);
    part.CopyRows(padded.k, gradients.k);
    part.CopyRows(padded.v, gradients.v);
  }
  return gradients;
}

// Returns the rows of all outputs [.., heads * value_dim] for queries like `q`.
at::Tensor JoinRows(const std::vector<at::Tensor>& outputs, const at::Tensor& q,
                    int64_t value_dim) {
  if (outputs.empty()) return at::empty({0, q.size(1) * value_dim}, q.options());
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 0);
}

// Returns sequences that attend to themselves.
VarlenSequences WholeSequences(const std::vector<int64_t>& offsets, const SequenceTables& tables,
                               at::Device device) {
  TORCH_CHECK(tables.prefixes == nullptr, "FlashAttention has no shared prefixes");
  // Where no sequence has more than one row, libtorch's FlashAttention expects a row of each.
  int64_t longest = 2;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    longest = std::max(longest, offsets[s + 1] - offsets[s]);
  }
  const at::Tensor on_device = tables.device_offsets.defined()
                                   ? tables.device_offsets
                                   : CopyToDevice(offsets, device).to(at::kInt);
  return {.row_offsets = on_device,
          .key_offsets = on_device,
          .longest_rows = longest,
          .longest_keys = longest};
}

}  // namespace

at::Tensor AttendRuns(const at::Tensor& q, const std::vector<int64_t>& offsets,
                      const PagedSequences& sequences, const at::Tensor& key_cache,
                      const at::Tensor& value_cache, const AttentionScores& scores,
                      int64_t max_gathered, int64_t min_rows, at::Tensor out) {
  const int64_t block_tokens = key_cache.size(2);
  auto known = sequences.key_runs.find(scores.window);
  if (known == sequences.key_runs.end()) {
    const int64_t max_keys = max_gathered / (key_cache.size(1) * key_cache.size(3));
    known = sequences.key_runs
                .emplace(scores.window, PlanKeyRuns(offsets, sequences, block_tokens, scores.window,
                                                    max_keys, min_rows))
                .first;
  }
  if (!out.defined() && known->second.size() != 1) {
    out = at::empty({q.size(0), q.size(1) * value_cache.size(3)}, q.options());
  }
  for (const KeyRun& run : known->second) {
    const auto gather = [&](const at::Tensor& cache) {  // [keys, kv_heads, D]
      return cache.transpose(1, 2).index({run.blocks, run.places}).to(q.scalar_type());
    };
    const bool has_gaps = run.row_indices.defined();
    at::Tensor y = VarlenAttention(
        has_gaps ? q.index_select(0, run.row_indices) : q.narrow(0, run.row, run.rows),
        gather(key_cache), gather(value_cache), run.sequences, scores);
    if (!out.defined()) return y;
    if (has_gaps) {
      out.index_copy_(0, run.row_indices, y);
    } else {
      out.narrow(0, run.row, run.rows).copy_(y);
    }
  }
  return out;
}

at::Tensor AtenCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const AttentionScores& scores,
                               const SequenceTables& tables) {
  if (q.size(0) == 0) return JoinRows({}, q, v.size(2));
  const SharedPrefixes* const prefixes = tables.prefixes.get();
  if (HasVarlenAttention(q, scores)) {
    return VarlenAttention(q, k, v, WholeSequences(offsets, tables, q.device()), scores);
  }
  if (q.is_cuda() && prefixes == nullptr) return AttendPadded(q, k, v, offsets, scores);
  std::vector<at::Tensor> outputs;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const SequenceRuns sequence(offsets, prefixes, s);
    const int64_t begin = sequence.own().row, rows = sequence.own().rows;
    if (rows == 0) continue;
    const int64_t start = sequence.start();
    const at::Tensor keys = SelectRuns(k, sequence.runs()), values = SelectRuns(v, sequence.runs());
    for (const RowChunk& chunk : RowChunks(start, start + rows, scores.window)) {
      outputs.push_back(AtenAttention(q.narrow(0, begin + chunk.row - start, chunk.rows),
                                      keys.narrow(0, chunk.key, chunk.keys),
                                      values.narrow(0, chunk.key, chunk.keys), chunk, scores));
    }
  }
  return JoinRows(outputs, q, v.size(2));
}

at::Tensor AtenCachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                               const at::Tensor& key_cache, const at::Tensor& value_cache,
                               const AttentionScores& scores, int64_t max_gathered) {
  const PagedRows& rows = sequences.rows;
  TORCH_CHECK(rows.blocks.defined(), "the rows of the pass are not planned");
  for (const auto& [cache, x] : {std::pair{key_cache, k}, {value_cache, v}}) {
    cache.transpose(1, 2).index_put_({rows.blocks, rows.places}, x.to(cache.scalar_type()));
  }
  if (HasVarlenAttention(q, scores)) {
    return AttendRuns(q, offsets, sequences, key_cache, value_cache, scores, max_gathered,
                      /*min_rows=*/1);
  }
  const bool takes_together = !scores.soft_cap.has_value();
  at::Tensor out = at::empty({q.size(0), q.size(1) * v.size(2)}, q.options());
  if (takes_together) {
    for (const RowsTogether& together : rows.together) {
      AttendTogether(q, together, sequences.block_table, key_cache, value_cache, scores,
                     max_gathered, out);
    }
  }
  for (size_t s = 0; s < sequences.starts.size(); ++s) {
    const int64_t begin = offsets[s], count = offsets[s + 1] - begin;
    if (count == 0 || (takes_together && count <= rows.most_together)) continue;
    AttendSequence(q.narrow(0, begin, count), sequences.starts[s],
                   sequences.block_table.select(0, static_cast<int64_t>(s)), key_cache, value_cache,
                   scores, out.narrow(0, begin, count));
  }
  return out;
}

// Divides the work by sequence, key/value head, and the query heads that share it. Operations of
// ATen on whole batches, each of which would wake the threads, are many times slower on short
// sequences.
AttentionGradients AtenCausalAttentionBackward(const at::Tensor& dy_in, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const std::vector<int64_t>& offsets,
                                               const AttentionScores& scores,
                                               const SequenceTables& tables) {
  if (q.size(0) == 0) return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
  const SharedPrefixes* const prefixes = tables.prefixes.get();
  if (HasVarlenAttention(q, scores)) {
    return VarlenAttentionBackward(dy_in, q, k, v, WholeSequences(offsets, tables, q.device()),
                                   scores);
  }
  if (q.is_cuda() && prefixes == nullptr) {
    return AttendPaddedBackward(dy_in, q, k, v, offsets, scores);
  }
  if (scores.soft_cap.has_value()) {
    return CappedAttentionBackward(dy_in, q, k, v, offsets, scores, prefixes);
  }
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
  const auto add = [&](const KeyGradients& some) {
    const auto run = [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread
      for (int64_t item = begin; item < end; ++item) {
        const int64_t split = item % splits, head = item / splits % key_value_heads;
        const int64_t i = item / splits / key_value_heads, place = some.places[i];
        const SequenceRuns sequence(offsets, prefixes, static_cast<size_t>(some.first + i));
        const int64_t row = sequence.own().row, count = sequence.own().rows;
        if (count == 0) continue;
        const int64_t start = sequence.start();
        const int64_t first_head = head * group + split * kHeadsPerItem;
        const int64_t heads = std::min(kHeadsPerItem, group - split * kHeadsPerItem);
        const auto of_sequence = [&](const at::Tensor& x) {  // [keys, 1, D]
          return SelectRuns(x.narrow(1, head, 1), sequence.runs());
        };
        const at::Tensor k_head = of_sequence(k), v_head = of_sequence(v);
        for (const RowChunk& chunk : RowChunks(start, start + count, scores.window)) {
          const auto rows = [&](const at::Tensor& x) {  // [1, heads, rows, D]
            return x.narrow(0, row + chunk.row - start, chunk.rows)
                .narrow(1, first_head, heads)
                .transpose(0, 1)
                .unsqueeze(0);
          };
          const auto keys = [&](const at::Tensor& x, int64_t first) {  // [1, 1, keys, D]
            return x.narrow(0, first + chunk.key, chunk.keys).transpose(0, 1).unsqueeze(0);
          };
          const auto shared = [&](const at::Tensor& x) {
            return keys(x, 0).expand({1, heads, chunk.keys, x.size(2)});
          };
          const auto gradients = [&](const at::Tensor& x) {
            return keys(x[split].narrow(1, head, 1), place);
          };
          const c10::optional<at::Tensor> mask = chunk.Mask(q.options());
          const at::Tensor qi = rows(q), ki = shared(k_head);
          const at::Tensor vi =
              value_dim == head_dim
                  ? shared(v_head)
                  : PadColumns(keys(v_head, 0), head_dim).expand({1, heads, chunk.keys, head_dim});
          const auto [y, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
              qi, ki, vi, /*dropout_p=*/0.0, chunk.is_causal(), mask, scores.scale);
          const auto [dqi, dki, dvi] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
              PadColumns(rows(dy), head_dim), qi, ki, vi, y, log_sum, /*dropout_p=*/0.0,
              chunk.is_causal(), mask, scores.scale);
          rows(dq).copy_(dqi);
          gradients(some.dk).add_(dki.sum(1, /*keepdim=*/true));
          gradients(some.dv).add_(dvi.sum(1, /*keepdim=*/true).narrow(3, 0, value_dim));
        }
      }
    };
    at::parallel_for(0, (some.last - some.first) * key_value_heads * splits, 1, run);
  };
  AddKeyGradients(prefixes, offsets, dk, dv, add);
  if (splits == 1) return {dq, dk[0], dv[0]};
  return {dq, dk.sum(0), dv.sum(0)};
}

}  // namespace tandem::ops
