// Which part of a model's parameters each rank of a sharded optimizer holds: of every block's
// buffer an equal, contiguous part (ZeRO, https://arxiv.org/abs/1910.02054).
#ifndef TANDEM_COMMON_PARALLEL_SHARD_PLAN_H_
#define TANDEM_COMMON_PARALLEL_SHARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/model/parameter.h"

namespace tandem::parallel {

// Consecutive values of a parameter.
struct ShardPiece {
  const Parameter* parameter = nullptr;
  int64_t offset = 0;        // of the first one among the parameter's values
  int64_t numel = 0;         // at least 1
  int64_t shard_offset = 0;  // of the first one in the rank's part of the buffer
};

// The pieces that part `index` of the `parts` equal ones of a block's buffer holds. At most one of
// each parameter; what lies between parameters is nobody's.
std::vector<ShardPiece> PlanShard(absl::Span<const Parameter> parameters, int64_t block,
                                  int64_t buffer_numel, int64_t parts, int64_t index);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_SHARD_PLAN_H_
