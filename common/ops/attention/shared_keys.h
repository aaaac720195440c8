// Keys and values of sequences that share prefixes (shared_prefixes.h), and their gradients.
#ifndef TANDEM_COMMON_OPS_ATTENTION_SHARED_KEYS_H_
#define TANDEM_COMMON_OPS_ATTENTION_SHARED_KEYS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "common/ops/attention/shared_prefixes.h"

namespace tandem::ops {

// Returns the rows of x [T, ..] in `runs`, side by side: a view of x where they are one run. With
// autograd.
at::Tensor SelectRuns(const at::Tensor& x, absl::Span<const RowRun> runs);

// Returns keys [T, kv_heads, D] and values [T, kv_heads, Dv] of a batch side by side and followed
// by the copies of SharedPrefixes::copies(): [num_rows, kv_heads, D + Dv]. No autograd.
at::Tensor KeyValueBlocks(const at::Tensor& k, const at::Tensor& v, const SharedPrefixes& prefixes);

// The gradients of the keys and values of sequences [first, last): those of sequence s begin at row
// places[s - first] of dk [.., K, kv_heads, D] and dv [.., K, kv_heads, Dv], one row a position.
struct KeyGradients {
  int64_t first, last;
  std::vector<int64_t> places;
  at::Tensor dk, dv;
};

// Adds to dk [.., T, kv_heads, D] and dv [.., T, kv_heads, Dv], the gradients of the rows, or some
// sums of each, what `add` adds for the positions of every sequence. A row that several sequences
// have gets their gradients in the order of the sequences. `add` is called for some sequences at a
// time, with sums of zeros; without `prefixes` once, for those at `offsets`, with dk and dv.
void AddKeyGradients(const SharedPrefixes* prefixes, const std::vector<int64_t>& offsets,
                     const at::Tensor& dk, const at::Tensor& dv,
                     absl::FunctionRef<void(const KeyGradients&)> add);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_SHARED_KEYS_H_
