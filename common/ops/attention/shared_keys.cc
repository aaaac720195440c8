#include "common/ops/attention/shared_keys.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem::ops {
namespace {

constexpr int64_t kRowDimension = -3;

at::Tensor ZerosOfKeys(const at::Tensor& like, int64_t keys) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[sizes.size() - 3] = keys;
  return at::zeros(sizes, like.options());
}

void AddRows(const at::Tensor& from, int64_t place, absl::Span<const RowRun> runs,
             const at::Tensor& to) {
  for (const RowRun& run : runs) {
    to.narrow(kRowDimension, run.row, run.rows).add_(from.narrow(kRowDimension, place, run.rows));
    place += run.rows;
  }
}

}  // namespace

at::Tensor SelectRuns(const at::Tensor& x, absl::Span<const RowRun> runs) {
  std::vector<at::Tensor> rows;
  rows.reserve(runs.size());
  for (const RowRun& run : runs) rows.push_back(x.narrow(0, run.row, run.rows));
  return rows.size() == 1 ? rows[0] : at::cat(rows, 0);
}

at::Tensor KeyValueBlocks(const at::Tensor& k, const at::Tensor& v,
                          const SharedPrefixes& prefixes) {
  const int64_t rows = k.size(0), width = k.size(2);
  at::Tensor blocks = at::empty({prefixes.num_rows(), k.size(1), width + v.size(2)}, k.options());
  const at::Tensor own = blocks.narrow(0, 0, rows);
  own.narrow(2, 0, width).copy_(k);
  own.narrow(2, width, v.size(2)).copy_(v);
  for (const SharedPrefixes::Copy& copy : prefixes.copies()) {
    blocks.narrow(0, copy.to, copy.from.rows)
        .copy_(blocks.narrow(0, copy.from.row, copy.from.rows));
  }
  return blocks;
}

void AddKeyGradients(const SharedPrefixes* prefixes, const std::vector<int64_t>& offsets,
                     const at::Tensor& dk, const at::Tensor& dv,
                     absl::FunctionRef<void(const KeyGradients&)> add) {
  if (prefixes == nullptr) {
    add({.first = 0, .last = std::ssize(offsets) - 1, .places = offsets, .dk = dk, .dv = dv});
    return;
  }
  const auto count = static_cast<int64_t>(prefixes->size());
  const int64_t sums = dk.dim() == 4 ? dk.size(0) : 1;
  const int64_t most = kKeysPerRow * dk.size(kRowDimension) / sums;
  for (int64_t first = 0; first < count;) {
    KeyGradients some = {.first = first, .last = first, .places = {}, .dk = {}, .dv = {}};
    int64_t keys = 0;
    for (; some.last < count; ++some.last) {
      const int64_t length = prefixes->length(static_cast<size_t>(some.last));
      if (keys > 0 && keys + length > most) break;
      some.places.push_back(keys);
      keys += length;
    }
    some.dk = ZerosOfKeys(dk, keys);
    some.dv = ZerosOfKeys(dv, keys);
    add(some);
    for (int64_t s = first; s < some.last; ++s) {
      const int64_t place = some.places[static_cast<size_t>(s - first)];
      const absl::Span<const RowRun> runs = prefixes->runs(static_cast<size_t>(s));
      AddRows(some.dk, place, runs, dk);
      AddRows(some.dv, place, runs, dv);
    }
    first = some.last;
  }
}

}  // namespace tandem::ops
