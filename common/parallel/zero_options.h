// The layout of the `zero` strategy. No torch.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_

#include "common/parallel/recompute.h"

namespace tandem::parallel {

// Fields as in the configuration, under "strategy", and as DeepSpeed's.
struct ZeroOptions {
  int stage = 2;
  // Starts the next block's gathering, and the last block's adding up, beside the computation.
  bool overlap_comm = true;
  // Keeps the optimizer's state, and updates, on the CPU.
  bool offload_optimizer = false;
  Recompute recompute = Recompute::kNone;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_OPTIONS_H_
