#include "common/ops/attention/partial_attention.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <limits>

namespace tandem::ops {
namespace {

// The most scores that exist at a time, unless kMinTileRows rows have more: on the CPU, as many as
// its cache holds. A causal tile computes scores that the mask discards, so it has few rows.
constexpr int64_t kMaxScoresOnCpu = 1 << 19, kMaxScores = 1 << 24;
constexpr int64_t kMinTileRows = 16, kMaxTileRows = 256;

struct Tile {
  int64_t row, rows, keys;
};

// Calls fn(tile) for tiles that together cover all rows and the keys that they see.
template <typename Function>
void ForEachTile(const at::Tensor& q, const at::Tensor& pair, bool causal, const Function& fn) {
  const int64_t rows = q.size(1), keys = pair.size(1), heads = q.size(0) * q.size(2);
  const int64_t max_scores = q.is_cpu() ? kMaxScoresOnCpu : kMaxScores;
  const int64_t step = std::clamp(max_scores / (heads * keys), kMinTileRows, kMaxTileRows);
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t end = std::min(row + step, rows);
    fn(Tile{row, end - row, causal ? keys - rows + end : keys});
  }
}

// [G, R, M, X] -> [G, rows * M, X], a view.
at::Tensor Rows(const at::Tensor& x, const Tile& tile) {
  return x.narrow(1, tile.row, tile.rows).view({x.size(0), tile.rows * x.size(2), x.size(3)});
}

// Keys of width D in `pair`, and values of width Dv.
at::Tensor Keys(const at::Tensor& pair, const Tile& tile, int64_t width) {
  return pair.narrow(1, 0, tile.keys).narrow(2, 0, width);
}
at::Tensor Values(const at::Tensor& pair, const Tile& tile, int64_t key_width, int64_t width) {
  const int64_t first = pair.size(2) == key_width ? 0 : key_width;
  return pair.narrow(1, 0, tile.keys).narrow(2, first, width);
}

// Converts an operand of a product: the CPU has no products of bfloat16 that give float32.
at::Tensor Operand(const at::Tensor& x, at::ScalarType type) {
  return x.to(x.is_cpu() ? SumType(type) : type);
}

// Returns the batched product of two operands, of SumType.
at::Tensor Product(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType type = SumType(a.scalar_type());
  return a.scalar_type() == type ? at::bmm(a, b) : at::bmm(a, b, type);
}

// Returns the scores [G, rows * M, keys]; -infinity where the mask hides the key.
at::Tensor Scores(const at::Tensor& q, const at::Tensor& pair, const PartialScores& partial,
                  const Tile& tile) {
  at::Tensor scores = Product(Rows(q, tile), Keys(pair, tile, q.size(3)).transpose(1, 2));
  scores.mul_(partial.scores.ScaleOf(q.size(3)));
  if (const auto cap = partial.scores.soft_cap; cap.has_value()) {
    scores.div_(*cap).tanh_().mul_(*cap);
  }
  const auto hide = [&](const at::Tensor& hidden) {  // [rows, keys]
    scores.view({q.size(0), tile.rows, q.size(2), tile.keys})
        .masked_fill_(hidden.unsqueeze(1), -std::numeric_limits<double>::infinity());
  };
  if (partial.causal) {
    const int64_t before = pair.size(1) - q.size(1);  // keys before the first row's own
    hide(at::ones({tile.rows, tile.keys}, q.options().dtype(at::kBool))
             .triu_(before + tile.row + 1));
  }
  if (partial.scores.window != kNoWindow) {
    const at::Tensor rows = partial.row_positions.narrow(0, tile.row, tile.rows).unsqueeze(1);
    hide(partial.key_positions.narrow(0, 0, tile.keys) <= rows - partial.scores.window);
  }
  return scores;
}

}  // namespace

at::ScalarType SumType(at::ScalarType type) { return at::toOpMathType(type); }

at::Tensor GroupHeads(const at::Tensor& x, int64_t groups) {
  return x.unflatten(1, {groups, x.size(1) / groups}).transpose(0, 1).contiguous();
}

at::Tensor UngroupHeads(const at::Tensor& x) { return x.transpose(0, 1).flatten(1, 2); }

AttentionSum NoAttention(const at::Tensor& rows, int64_t value_dim) {
  const auto options = rows.options().dtype(SumType(rows.scalar_type()));
  return {.output = at::zeros({rows.size(0), rows.size(1), rows.size(2), value_dim}, options),
          .log_sum = at::full({rows.size(0), rows.size(1), rows.size(2), 1},
                              -std::numeric_limits<double>::infinity(), options)};
}

void AddAttention(const at::Tensor& q_in, const at::Tensor& pair_in, const PartialScores& scores,
                  const AttentionSum& sum) {
  const at::ScalarType type = q_in.scalar_type();
  const at::Tensor q = Operand(q_in, type), pair = Operand(pair_in, type);
  ForEachTile(q, pair, scores.causal, [&](const Tile& tile) {
    at::Tensor p = Scores(q, pair, scores, tile);
    const at::Tensor peak = p.amax(-1, /*keepdim=*/true);
    // Rows that see no key have no peak to subtract: 0, and not a number otherwise.
    p.sub_(peak.clamp_min(std::numeric_limits<float>::lowest())).exp_();
    const at::Tensor log_sum = p.sum(-1, /*keepdim=*/true).log_().add_(peak);
    at::Tensor output =
        Product(Operand(p, type), Values(pair, tile, q.size(3), sum.output.size(3)));
    const at::Tensor all = Rows(sum.log_sum, tile), merged = at::logaddexp(all, log_sum);
    output.mul_((peak - merged).exp_());
    Rows(sum.output, tile).mul_((all - merged).exp_()).add_(output);
    all.copy_(merged);
  });
}

void AddAttentionGradients(const AttentionRows& rows, const at::Tensor& pair_in,
                           const PartialScores& scores, const at::Tensor& dq,
                           const at::Tensor& dpair) {
  const at::ScalarType type = rows.q.scalar_type();
  const at::Tensor q = Operand(rows.q, type), dy = Operand(rows.dy, type);
  const at::Tensor pair = Operand(pair_in, type);
  const double scale = scores.scores.ScaleOf(q.size(3));
  const int64_t width = q.size(3), value_width = dy.size(3);
  ForEachTile(q, pair, scores.causal, [&](const Tile& tile) {
    const at::Tensor tile_dy = Rows(dy, tile);
    const at::Tensor s = Scores(q, pair, scores, tile);
    at::Tensor slope;  // of the soft cap; 0 for keys that are hidden
    if (const auto cap = scores.scores.soft_cap; cap.has_value()) {
      slope = (s / *cap).square_().neg_().add_(1).clamp_min_(0);
    }
    const at::Tensor p = at::Tensor(s).sub_(Rows(rows.log_sum, tile)).exp_();
    Values(dpair, tile, width, value_width)
        .add_(Product(Operand(p, type).transpose(1, 2), tile_dy));
    at::Tensor ds = Product(tile_dy, Values(pair, tile, width, value_width).transpose(1, 2));
    ds.sub_(Rows(rows.delta, tile)).mul_(p).mul_(scale);
    if (slope.defined()) ds.mul_(slope);
    ds = Operand(ds, type);
    Rows(dq, tile).add_(Product(ds, Keys(pair, tile, width)));
    Keys(dpair, tile, width).add_(Product(ds.transpose(1, 2), Rows(q, tile)));
  });
}

}  // namespace tandem::ops
