// Where the sequences of a pass lie in a paged cache of keys and values.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
#define TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// Sequences with one new row each, which have about as many blocks: attention takes them together.
struct SingleRows {
  at::Tensor rows;       // [N] int64: their rows in the batch, ascending
  at::Tensor sequences;  // [N] int64: their rows in the block table
  at::Tensor positions;  // [N] int64: the positions of the rows
  int64_t blocks = 0;    // the most that one of them has
};

// The rows of a pass as attention in ATen operations takes them, so that no layer loops over
// sequences that continue by one token. Tensors are on the device of the cache.
struct PagedRows {
  at::Tensor blocks, places;  // [T] int64: where each row's key and value go
  std::vector<SingleRows> singles;
};

// S sequences. Made once for a pass, and read by every layer.
struct PagedSequences {
  std::vector<int64_t> starts;  // [S]: the position of each sequence's first new row
  // [S, longest table] int32, contiguous, on the device of the cache: the block of each run of
  // positions; entries past a sequence's last block name any block.
  at::Tensor block_table;
  PagedRows rows = {};  // needed where attention runs in ATen operations (AttendsInAten)
};

// Returns the rows of sequences whose rows in the batch are [offsets[s], offsets[s + 1]), for
// blocks of `block_tokens` positions; with one copy to the device. block_table is that of the
// sequences, on the CPU.
PagedRows PlanPagedRows(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
                        const at::Tensor& block_table, int64_t block_tokens, at::Device device);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
