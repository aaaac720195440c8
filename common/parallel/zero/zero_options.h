// Options of the `zero` strategy. No torch.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_ZERO_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_ZERO_OPTIONS_H_

#include <cstdint>

namespace tandem::parallel {

// Fields as in the configuration, under "strategy", and as DeepSpeed's.
struct ZeroOptions {
  int stage;
  // Gathers the next block and reduces the last block's gradients while a block runs.
  bool overlap_comm;
  // Keeps the optimizer's state on the CPU and updates there.
  bool offload_optimizer;
  // The most values that one reduce-scatter, or one all-gather, moves.
  int64_t reduce_bucket_size;
  int64_t allgather_bucket_size;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_ZERO_OPTIONS_H_
