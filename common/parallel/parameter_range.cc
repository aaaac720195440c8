#include "common/parallel/parameter_range.h"

#include <algorithm>
#include <cstddef>

namespace tandem::parallel {

std::vector<Run> RunsOf(const ParameterRange& range) {
  // The parameter is [outer, whole_width] and the shard [outer, width] of it, from column `begin`.
  int64_t outer = 1, all = 1;
  for (size_t axis = 0; axis < range.shape.size(); ++axis) {
    if (static_cast<int64_t>(axis) < range.shard.axis) outer *= range.shape[axis];
    all *= range.shape[axis];
  }
  if (all == 0) return {};
  const int64_t whole_width = all / outer;
  int64_t begin = 0, width = whole_width;
  if (range.shard.count > 1) {
    const int64_t extent = range.shape[static_cast<size_t>(range.shard.axis)];
    const int64_t inner = whole_width / extent;
    begin = range.shard.Begin(extent) * inner;
    width = range.shard.Size(extent) * inner;
  }
  if (width == 0) return {};
  std::vector<Run> runs;
  const int64_t end = range.offset + range.numel;
  for (int64_t at = range.offset; at < end;) {
    const int64_t row = at / width, numel = std::min(end, (row + 1) * width) - at;
    runs.push_back({.in_whole = row * whole_width + begin + at % width,
                    .in_range = at - range.offset,
                    .numel = numel});
    at += numel;
  }
  return runs;
}

}  // namespace tandem::parallel
