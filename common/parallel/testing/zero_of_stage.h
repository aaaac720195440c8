// For tests: options of the `zero` strategy.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_ZERO_OF_STAGE_H_
#define TANDEM_COMMON_PARALLEL_TESTING_ZERO_OF_STAGE_H_

#include <cstdint>

#include "common/parallel/zero/zero_options.h"

namespace tandem::parallel {

// Returns options with overlap, without offload, and with buckets that hold a whole tiny model.
inline ZeroOptions ZeroOfStage(int stage) {
  constexpr int64_t kBucket = 1 << 24;
  return {.stage = stage,
          .overlap_comm = true,
          .offload_optimizer = false,
          .reduce_bucket_size = kBucket,
          .allgather_bucket_size = kBucket};
}

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_ZERO_OF_STAGE_H_
