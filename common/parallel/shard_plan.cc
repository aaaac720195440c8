#include "common/parallel/shard_plan.h"

#include <algorithm>

namespace tandem::parallel {

std::vector<ShardPiece> PlanShard(absl::Span<const Parameter> parameters, int64_t block,
                                  int64_t buffer_numel, int64_t parts, int64_t index) {
  const int64_t part = buffer_numel / parts;
  const int64_t begin = index * part, end = begin + part;
  std::vector<ShardPiece> pieces;
  for (const Parameter& parameter : parameters) {
    if (parameter.spec.block != block) continue;
    const int64_t first = parameter.value.storage_offset();
    const int64_t from = std::max(first, begin);
    const int64_t to = std::min(first + parameter.value.numel(), end);
    if (from >= to) continue;
    pieces.push_back({.parameter = &parameter,
                      .offset = from - first,
                      .numel = to - from,
                      .shard_offset = from - begin});
  }
  return pieces;
}

}  // namespace tandem::parallel
