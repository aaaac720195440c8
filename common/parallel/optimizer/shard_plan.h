// The plan of a rank's shard: which values of which parameters it holds of a flat buffer. ZeRO
// (https://arxiv.org/abs/1910.02054) divides every buffer of a model (Model::BlockBuffers) into
// equal, contiguous shards, one per rank, without regard to where a parameter begins or ends.
#ifndef TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARD_PLAN_H_
#define TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/model/parameters/parameter.h"

namespace tandem::parallel {

// Consecutive values of one parameter that lie in one shard of the buffer.
struct ShardRange {
  const Parameter* parameter = nullptr;
  int64_t offset = 0;        // of the first value, within the parameter
  int64_t numel = 0;         // at least 1
  int64_t shard_offset = 0;  // of the first value, within the shard
};

// Returns the range that shard `index` of `shards` holds of a parameter in a buffer of
// `buffer_numel` values; numel is 0 if it holds none.
ShardRange RangeInShard(const Parameter& parameter, int64_t buffer_numel, int64_t shards,
                        int64_t index);

// Returns the ranges that shard `index` of `shards` holds of buffer `buffer`, which has
// `buffer_numel` values. Each parameter contributes at most one range. Alignment padding between
// parameters belongs to no range.
std::vector<ShardRange> PlanShard(absl::Span<const Parameter> parameters, int64_t buffer,
                                  int64_t buffer_numel, int64_t shards, int64_t index);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARD_PLAN_H_
