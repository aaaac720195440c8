// The size of a parameter's tensor-parallel shard. No torch.
#ifndef TANDEM_COMMON_MODEL_SHARD_NUMEL_H_
#define TANDEM_COMMON_MODEL_SHARD_NUMEL_H_

#include <cstdint>

#include "common/model/parameter_spec.h"
#include "common/model/shard.h"

namespace tandem {

// The number of values that rank `rank` of `ranks` holds of a parameter.
inline int64_t ShardNumel(const ParameterSpec& spec, int64_t rank, int64_t ranks) {
  if (!spec.shard_axis.has_value()) return spec.numel();
  const Shard shard = {.axis = *spec.shard_axis, .index = rank, .count = ranks};
  int64_t numel = 1;
  for (const int64_t extent : shard.ShapeOf(spec.shape)) numel *= extent;
  return numel;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_SHARD_NUMEL_H_
