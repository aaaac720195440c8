// The values of a parameter that a rank holds. No torch.
#ifndef TANDEM_COMMON_PARALLEL_PARAMETER_RANGE_H_
#define TANDEM_COMMON_PARALLEL_PARAMETER_RANGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/parameters/shard.h"

namespace tandem::parallel {

// Consecutive values of a parameter, or of a tensor-parallel shard of it.
struct ParameterRange {
  std::string parameter;
  std::vector<int64_t> shape;  // of the whole parameter
  Shard shard = {};
  int64_t offset = 0;  // of the first value, within the shard
  int64_t numel = 0;
};

// Values that are consecutive both in a range and in the whole parameter.
struct Run {
  int64_t in_whole, in_range, numel;
};

// Returns the runs of a range in ascending order.
std::vector<Run> RunsOf(const ParameterRange& range);

// A rank, and values of a parameter that it holds.
struct Holding {
  int rank = 0;
  ParameterRange range;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_PARAMETER_RANGE_H_
