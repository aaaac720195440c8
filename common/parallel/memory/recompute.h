// Activation recomputation: what a pass does not keep, and computes again in its backward pass.
#ifndef TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTE_H_
#define TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTE_H_

namespace tandem::parallel {

// `recompute_granularity` (https://arxiv.org/abs/2205.05198, section 5). The results are the same
// bits under every value.
enum class Recompute {
  kNone,
  // An attention keeps its queries, keys and values, and computes again what else its backward pass
  // needs: with ring attention the output and the row sums, on a GPU also keys and values repeated
  // for every query head. The CPU's kernels keep no more than that anyway.
  kSelective,
  // A layer keeps its input alone, and runs again.
  kFull,
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEMORY_RECOMPUTE_H_
