#include "common/ops/attention/padded_sequences.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {
namespace {

using Range = PaddedSequences::Range;

PaddedSequences Padded(const std::vector<Range>& sequences, at::Device device) {
  PaddedSequences result;
  result.ranges = sequences;
  result.count = std::ssize(sequences);
  for (const Range& one : sequences) result.rows = std::max(result.rows, one.rows);
  if (result.count == 1) return result;
  std::vector<int64_t> padded, places, rows;
  for (int64_t r = 0; r < result.rows; ++r) {
    for (const Range& one : sequences) padded.push_back(one.begin + std::min(r, one.rows - 1));
  }
  for (int64_t s = 0; s < result.count; ++s) {
    const auto [begin, count] = sequences[static_cast<size_t>(s)];
    for (int64_t r = 0; r < count; ++r) {
      places.push_back(r * result.count + s);
      rows.push_back(begin + r);
    }
  }
  const int64_t taken = std::ssize(padded), own = std::ssize(places);
  padded.insert(padded.end(), places.begin(), places.end());
  padded.insert(padded.end(), rows.begin(), rows.end());
  const at::Tensor uploaded = CopyToDevice(padded, device);
  result.padded = uploaded.narrow(0, 0, taken);
  result.places = uploaded.narrow(0, taken, own);
  result.in_batch = uploaded.narrow(0, taken + own, own);
  return result;
}

}  // namespace

int LengthClass(int64_t rows) {
  int length_class = 0;
  for (int64_t most = 16; most < rows; most *= 4) ++length_class;
  return length_class;
}

at::Tensor PaddedSequences::Pad(const at::Tensor& x) const {
  if (count == 1) return x.narrow(0, ranges[0].begin, rows);
  return x.index_select(0, padded).view({rows, count * x.size(1), x.size(2)});
}

at::Tensor PaddedSequences::PadWithZeros(const at::Tensor& x) const {
  if (count == 1) return x.narrow(0, ranges[0].begin, rows);
  return at::zeros({rows * count, x.size(1), x.size(2)}, x.options())
      .index_copy_(0, places, x.index_select(0, in_batch))
      .view({rows, count * x.size(1), x.size(2)});
}

at::Tensor PaddedSequences::Rows(const at::Tensor& x) const {
  if (count == 1) return x;
  return x.reshape({rows * count, x.size(1) / count}).index_select(0, places);
}

void PaddedSequences::CopyRows(const at::Tensor& x, const at::Tensor& batch) const {
  if (count == 1) {
    batch.narrow(0, ranges[0].begin, rows).copy_(x);
  } else {
    batch.index_copy_(
        0, in_batch,
        x.reshape({rows * count, batch.size(1), batch.size(2)}).index_select(0, places));
  }
}

std::vector<PaddedSequences> PadByLength(const std::vector<int64_t>& offsets, int64_t heads,
                                         int64_t max_scores, at::Device device) {
  std::map<int, std::vector<Range>> classes;
  std::vector<PaddedSequences> result;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const Range one = {.begin = offsets[s], .rows = offsets[s + 1] - offsets[s]};
    if (one.rows > kMaxPaddedRows) {
      result.push_back(Padded({one}, device));
    } else if (one.rows > 0) {
      classes[LengthClass(one.rows)].push_back(one);
    }
  }
  for (const auto& [_, sequences] : classes) {
    const int64_t longest = std::ranges::max(sequences, {}, &Range::rows).rows;
    const auto step =
        static_cast<size_t>(std::max<int64_t>(max_scores / (heads * longest * longest), 1));
    for (size_t first = 0; first < sequences.size(); first += step) {
      const size_t end = std::min(first + step, sequences.size());
      result.push_back(Padded({sequences.begin() + static_cast<std::ptrdiff_t>(first),
                               sequences.begin() + static_cast<std::ptrdiff_t>(end)},
                              device));
    }
  }
  return result;
}

}  // namespace tandem::ops
