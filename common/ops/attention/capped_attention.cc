#include "common/ops/attention/capped_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "common/ops/attention/partial_attention.h"
#include "common/ops/attention/shared_keys.h"

namespace tandem::ops {
namespace {

PartialScores ScoresOf(const RowChunk& chunk, const AttentionScores& scores,
                       const at::Tensor& like) {
  PartialScores partial = {.scores = scores, .causal = true};
  if (scores.window == kNoWindow) return partial;
  const auto options = like.options().dtype(at::kLong);
  partial.row_positions = at::arange(chunk.row, chunk.row + chunk.rows, options);
  partial.key_positions = at::arange(chunk.key, chunk.key + chunk.keys, options);
  return partial;
}

// Returns keys and values [keys, kv_heads, D or Dv] side by side, [kv_heads, keys, D + Dv].
at::Tensor Pair(const at::Tensor& k, const at::Tensor& v) {
  return at::cat({k.transpose(0, 1), v.transpose(0, 1)}, 2);
}

}  // namespace

at::Tensor CappedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const RowChunk& chunk, const AttentionScores& scores) {
  const at::Tensor rows = GroupHeads(q, k.size(1));
  const AttentionSum sum = NoAttention(rows, v.size(2));
  AddAttention(rows, Pair(k, v), ScoresOf(chunk, scores, q), sum);
  return UngroupHeads(sum.output).flatten(1, 2).to(q.scalar_type());
}

AttentionGradients CappedAttentionBackward(const at::Tensor& dy_in, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const std::vector<int64_t>& offsets,
                                           const AttentionScores& scores,
                                           const SharedPrefixes* prefixes) {
  const int64_t groups = k.size(1), heads_per_group = q.size(1) / groups;
  const int64_t width = k.size(2), value_width = v.size(2);
  const at::Tensor dy = dy_in.view({q.size(0), q.size(1), value_width});
  const at::ScalarType type = SumType(q.scalar_type());
  const auto zeros = [&](const at::Tensor& x) {
    return at::zeros(x.sizes(), x.options().dtype(type));
  };
  const at::Tensor dq = zeros(q), dk = zeros(k), dv = zeros(v);
  // Adds the gradients of the `count` groups from `group` on, for the rows of the i-th sequence.
  const auto add = [&](const KeyGradients& some, int64_t i, int64_t group, int64_t count) {
    const SequenceRuns sequence(offsets, prefixes, static_cast<size_t>(some.first + i));
    const int64_t row = sequence.own().row, own = sequence.own().rows;
    if (own == 0) return;
    const int64_t start = sequence.start();
    const auto of_sequence = [&](const at::Tensor& x) {  // [keys, count, D]
      return SelectRuns(x.narrow(1, group, count), sequence.runs());
    };
    const at::Tensor k_groups = of_sequence(k), v_groups = of_sequence(v);
    for (const RowChunk& chunk : RowChunks(start, start + own, scores.window)) {
      const auto rows = [&](const at::Tensor& x) {
        return x.narrow(0, row + chunk.row - start, chunk.rows)
            .narrow(1, group * heads_per_group, count * heads_per_group);
      };
      const auto keys = [&](const at::Tensor& x) { return x.narrow(0, chunk.key, chunk.keys); };
      const auto gradients = [&](const at::Tensor& x) {
        return x.narrow(0, some.places[i] + chunk.key, chunk.keys).narrow(1, group, count);
      };
      const PartialScores partial = ScoresOf(chunk, scores, q);
      const at::Tensor q_rows = GroupHeads(rows(q), count), dy_rows = GroupHeads(rows(dy), count);
      const at::Tensor pair = Pair(keys(k_groups), keys(v_groups));
      const AttentionSum sum = NoAttention(q_rows, value_width);
      AddAttention(q_rows, pair, partial, sum);
      const at::Tensor delta = (dy_rows.to(type) * sum.output).sum(-1, /*keepdim=*/true);
      const at::Tensor dq_rows = zeros(q_rows), dpair = zeros(pair);
      AddAttentionGradients({.q = q_rows, .dy = dy_rows, .log_sum = sum.log_sum, .delta = delta},
                            pair, partial, dq_rows, dpair);
      rows(dq).copy_(UngroupHeads(dq_rows));
      const at::Tensor by_key = dpair.transpose(0, 1);
      gradients(some.dk).add_(by_key.narrow(2, 0, width));
      gradients(some.dv).add_(by_key.narrow(2, width, value_width));
    }
  };
  AddKeyGradients(prefixes, offsets, dk, dv, [&](const KeyGradients& some) {
    const int64_t sequences = some.last - some.first;
    if (q.is_cpu()) {
      at::parallel_for(0, sequences * groups, 1, [&](int64_t begin, int64_t end) {
        const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a setting of this thread
        for (int64_t item = begin; item < end; ++item) add(some, item / groups, item % groups, 1);
      });
    } else {
      for (int64_t i = 0; i < sequences; ++i) add(some, i, 0, groups);
    }
  });
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

}  // namespace tandem::ops
