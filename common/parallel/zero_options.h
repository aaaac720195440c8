// Options of the `zero` strategy. No torch.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_

#include <cstdint>

namespace tandem::parallel {

// Fields as in the configuration, under "strategy", and as DeepSpeed's.
struct ZeroOptions {
  int stage = 2;
  // Gathers the next block and reduces the last block's gradients while a block runs.
  bool overlap_comm = true;
  // Keeps the optimizer's state on the CPU and updates there.
  bool offload_optimizer = false;
  // The most values that one reduce-scatter, or one all-gather, moves.
  int64_t reduce_bucket_size = 500'000'000;
  int64_t allgather_bucket_size = 500'000'000;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
