#include "common/parallel/optimizer/shard_plan.h"

#include <algorithm>

namespace tandem::parallel {

ShardRange RangeInShard(const Parameter& parameter, int64_t buffer_numel, int64_t shards,
                        int64_t index) {
  const int64_t shard_numel = buffer_numel / shards;
  const int64_t begin = index * shard_numel, end = begin + shard_numel;
  const int64_t first = parameter.value.storage_offset();
  const int64_t from = std::max(first, begin);
  const int64_t to = std::min(first + parameter.value.numel(), end);
  if (from >= to) return {.parameter = &parameter};
  return {.parameter = &parameter,
          .offset = from - first,
          .numel = to - from,
          .shard_offset = from - begin};
}

std::vector<ShardRange> PlanShard(absl::Span<const Parameter> parameters, int64_t buffer,
                                  int64_t buffer_numel, int64_t shards, int64_t index) {
  std::vector<ShardRange> ranges;
  for (const Parameter& parameter : parameters) {
    if (parameter.buffer != buffer || !parameter.value.defined()) continue;
    const ShardRange range = RangeInShard(parameter, buffer_numel, shards, index);
    if (range.numel > 0) ranges.push_back(range);
  }
  return ranges;
}

}  // namespace tandem::parallel
