// What a pass forgets on its way forward and computes again on its way back.
#ifndef TANDEM_COMMON_PARALLEL_RECOMPUTE_H_
#define TANDEM_COMMON_PARALLEL_RECOMPUTE_H_

namespace tandem::parallel {

// `recompute_granularity` (https://arxiv.org/abs/2205.05198, section 5). The numbers are the same
// bits whatever it is.
enum class Recompute {
  kNone,
  // Of an attention its queries, keys and values are kept, and what else its backward pass needs is
  // computed again: with ring attention the output and the row sums, on a GPU also keys and values
  // repeated for every query head. The CPU's kernels keep nothing else as it is.
  kSelective,
  // Of a block only its input is kept, and the block runs again.
  kFull,
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_RECOMPUTE_H_
