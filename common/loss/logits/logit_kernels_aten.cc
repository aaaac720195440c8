#include <ATen/ATen.h>

#include <algorithm>

#include "common/loss/logits/logit_kernels.h"

namespace tandem::loss {
namespace {

// Size of a block of rows, which is read and written some ten times and should stay in the cache of
// a CPU.
constexpr int64_t kBlockBytes = 4 << 20;

// Calls work(first row, number of rows) for blocks of rows of the tile.
template <typename Work>
void ForBlocks(const LogitTile& tile, const Work& work) {
  const int64_t rows = tile.logits.size(0);
  const int64_t row_bytes = tile.logits.size(1) * tile.logits.element_size();
  const int64_t block = std::max<int64_t>(1, kBlockBytes / row_bytes);
  for (int64_t row = 0; row < rows; row += block) work(row, std::min(block, rows - row));
}

// Returns a copy of z - max for rows of a tile. If `fill`, it computes `max` first.
at::Tensor Below(const LogitTile& tile, int64_t row, int64_t count, at::Tensor max, bool fill) {
  at::Tensor z = tile.logits.narrow(0, row, count);
  if (tile.scales.defined()) {
    z = z * tile.scales.narrow(0, row, count).unsqueeze(1);
    if (fill) max.copy_(z.amax(1));
    return z.sub_(max.unsqueeze(1));
  }
  if (fill) max.copy_(z.amax(1));
  return z - max.unsqueeze(1);
}

// The columns of the labels in a tile, and whether a label is in the tile.
struct LabelColumns {
  LabelColumns(const LogitTile& tile, int64_t row, int64_t count) {
    const at::Tensor column = tile.labels.narrow(0, row, count) - tile.first_label;
    inside = column.ge(0).logical_and_(column.lt(tile.logits.size(1)));
    columns = column.clamp(0, tile.logits.size(1) - 1).unsqueeze(1);
  }
  at::Tensor columns;  // [n, 1]
  at::Tensor inside;   // [n]
};

void Statistics(const LogitTile& tile, const RowStatistics& rows) {
  ForBlocks(tile, [&](int64_t row, int64_t count) {
    const auto rows_of = [&](const at::Tensor& x) { return x.narrow(0, row, count); };
    const at::Tensor max = rows_of(rows.max);
    at::Tensor below = Below(tile, row, count, max, /*fill=*/true);
    const LabelColumns label(tile, row, count);
    rows_of(rows.label)
        .copy_(below.gather(1, label.columns).squeeze(1).add_(max).mul_(label.inside));
    const at::Tensor exponentials = below.exp();
    rows_of(rows.sum).copy_(exponentials.sum(1));
    // A product and a sum: MKL's dot products of rows take ten times as long.
    rows_of(rows.weighted).copy_(below.mul_(exponentials).sum(1));
  });
}

void Gradient(const LogitTile& tile, const RowGradients& rows, at::ScalarType type) {
  const at::Tensor gradient = GradientOf(tile.logits, type);
  ForBlocks(tile, [&](int64_t row, int64_t count) {
    const auto column = [&](const at::Tensor& x) { return x.narrow(0, row, count).unsqueeze(1); };
    at::Tensor below = Below(tile, row, count, rows.max.narrow(0, row, count), /*fill=*/false);
    at::Tensor dz = below.exp();
    dz.mul_(below.mul_(column(rows.slopes)).add_(column(rows.constants)));
    const LabelColumns label(tile, row, count);
    dz.scatter_add_(1, label.columns, column(rows.at_label) * label.inside.unsqueeze(1));
    if (tile.soft_cap.has_value()) {
      const at::Tensor t = below.copy_(tile.logits.narrow(0, row, count)).div_(*tile.soft_cap);
      dz.mul_(t.square_().neg_().add_(1));
    }
    gradient.narrow(0, row, count).copy_(dz);
  });
}

int64_t ScratchBytes(int64_t tile_bytes) { return 2 * std::min(tile_bytes, kBlockBytes); }
}  // namespace

at::Tensor GradientOf(const at::Tensor& logits, at::ScalarType type) {
  if (logits.scalar_type() == type) return logits;
  return logits.view(type).narrow(1, 0, logits.size(1));
}

const LogitKernels kAtenLogitKernels = {Statistics, Gradient, ScratchBytes};

}  // namespace tandem::loss
