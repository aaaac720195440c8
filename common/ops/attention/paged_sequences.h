// Where the sequences of a pass lie in a paged cache of keys and values.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
#define TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// S sequences. Made once for a pass, and read by every layer.
struct PagedSequences {
  std::vector<int64_t> starts;  // [S]: the position of each sequence's first new row
  // [S, longest table] int32, contiguous, on the device of the cache: the block of each run of
  // positions; entries past a sequence's last block are not read.
  at::Tensor block_table;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
