// The size of a rank's shard of a parameter. No torch.
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_SHARD_NUMEL_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_SHARD_NUMEL_H_

#include <cstdint>

#include "common/model/config/parameter_spec.h"
#include "common/model/parameters/expert_shard.h"

namespace tandem {

// Returns the number of values that tensor-parallel rank `rank` of `ranks`, which holds `experts`,
// has of a parameter.
inline int64_t ShardNumel(const ParameterSpec& spec, int64_t rank, int64_t ranks,
                          const ExpertShard& experts) {
  if (!spec.IsIn(experts)) return 0;
  int64_t numel = 1;
  for (const int64_t extent : spec.ShardOf(rank, ranks, experts).ShapeOf(spec.shape)) {
    numel *= extent;
  }
  return numel;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_SHARD_NUMEL_H_
