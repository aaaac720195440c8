// The layout of the `zero` strategy. No torch.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_

#include <cstdint>

#include "common/parallel/recompute.h"

namespace tandem::parallel {

// Fields as in the configuration, under "strategy", and as DeepSpeed's.
struct ZeroOptions {
  int stage = 2;
  // Starts the next block's gathering, and the last block's adding up, beside the computation.
  bool overlap_comm = true;
  // Keeps the optimizer's state, and updates, on the CPU.
  bool offload_optimizer = false;
  // Values that are added up, or gathered, at a time.
  int64_t reduce_bucket_size = 500'000'000;
  int64_t allgather_bucket_size = 500'000'000;
  Recompute recompute_granularity = Recompute::kNone;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
