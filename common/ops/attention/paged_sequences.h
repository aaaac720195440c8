// Where the sequences of a pass lie in a paged cache of keys and values.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
#define TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/ops/attention/varlen_attention.h"

namespace tandem::ops {

// Sequences with one new row each, or with about as many, which have about as many blocks:
// attention takes them together.
struct RowsTogether {
  at::Tensor rows;        // [N] int64: their first rows in the batch, ascending
  at::Tensor sequences;   // [N] int64: their rows in the block table
  at::Tensor positions;   // [N] int64: the positions of the first rows
  at::Tensor counts;      // [N] int64: how many rows each has
  int64_t blocks = 0;     // the most that one of them has
  int64_t rows_each = 1;  // the most rows that one of them has
};

// Sequences whose keys are read together.
struct KeyRun {
  int64_t row = 0, rows = 0;  // of the batch; `row` is the first
  at::Tensor row_indices;     // [rows] int64, where rows of other sequences are between them
  at::Tensor blocks, places;  // [K] int64: where their keys are, one sequence after the other
  VarlenSequences sequences;
};

// The rows of a pass, for what writes into the cache, and as attention in ATen operations takes
// them, so that no layer loops over sequences that continue by one token, or on a GPU by at most
// kMaxPaddedRows. Tensors are on the device of the cache.
struct PagedRows {
  at::Tensor blocks, places;  // [T] int64: where each row's key and value go
  std::vector<RowsTogether> together;
  int64_t most_together = 1;  // new rows of a sequence that is among them
};

// The rows that the kernel paged_attention takes (kernels/paged_plan.h).
struct PagedKernelPlan {
  at::Tensor numbers;  // int32: the items, and behind them the rows with partial results
  // [2] int32: how many of the items and of those rows there are, where the device alone knows;
  // the numbers below are the most then. Undefined: all.
  at::Tensor counts = {};
  int64_t items = 0, partial_rows = 0, partials = 0;
};

// S sequences. Made once for a pass, and read by every layer.
struct PagedSequences {
  std::vector<int64_t> starts;  // [S]: the position of each sequence's first new row
  // [S, longest table] int32, contiguous, on the device of the cache: the block of each run of
  // positions; entries past a sequence's last block name any block.
  at::Tensor block_table;
  PagedRows rows = {};  // needed where NeedsPagedRows
  // PlanKeyRuns by the window of a layer: the first layer that has the window makes it.
  mutable std::map<int64_t, std::vector<KeyRun>> key_runs = {};
  // By the window of a layer and the query heads that share a key/value head, likewise.
  mutable std::map<std::pair<int64_t, int64_t>, PagedKernelPlan> kernel_plans = {};
};

// Returns the rows of sequences whose rows in the batch are [offsets[s], offsets[s + 1]), for
// blocks of `block_tokens` positions; with one copy to the device. block_table is that of the
// sequences, on the CPU.
PagedRows PlanPagedRows(const std::vector<int64_t>& offsets, const std::vector<int64_t>& starts,
                        const at::Tensor& block_table, int64_t block_tokens, at::Device device);

// Returns whole sequences, whose rows in the batch are [offsets[s], offsets[s + 1]), in blocks of
// kernels::kPagedBlockTokens of their own: NumOwnBlocks(offsets), one sequence after the other.
std::shared_ptr<const PagedSequences> PlanOwnBlocks(const std::vector<int64_t>& offsets,
                                                    at::Device device);
int64_t NumOwnBlocks(const std::vector<int64_t>& offsets);

// Returns the keys that the rows of the same sequences see through `window`, in runs of at most
// `max_keys` keys, or of one sequence. Sequences with fewer than `min_rows` rows, or none, are left
// out.
std::vector<KeyRun> PlanKeyRuns(const std::vector<int64_t>& offsets,
                                const PagedSequences& sequences, int64_t block_tokens,
                                int64_t window, int64_t max_keys, int64_t min_rows = 1);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PAGED_SEQUENCES_H_
