// Attention in ATen operations: all of it on a GPU, and its gradient on every device.
#ifndef TANDEM_COMMON_OPS_ATTENTION_ATEN_ATTENTION_H_
#define TANDEM_COMMON_OPS_ATTENTION_ATEN_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/capped_attention.h"
#include "common/ops/attention/gathered_keys.h"
#include "common/ops/attention/paged_sequences.h"
#include "common/ops/attention/sequence_tables.h"

namespace tandem::ops {

// CausalAttention and CachedAttention of ops.h, on any device and in any floating-point type.
// FlashAttention (HasVarlenAttention) has no shared prefixes.
// CachedAttention copies at most `max_gathered` numbers of keys at a time where sequences attend
// together, and at least those of one sequence.
at::Tensor AtenCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const AttentionScores& scores,
                               const SequenceTables& tables = {});
at::Tensor AtenCachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                               const at::Tensor& key_cache, const at::Tensor& value_cache,
                               const AttentionScores& scores,
                               int64_t max_gathered = kGatheredNumbers);

// Attention of the sequences with at least `min_rows` rows to a cache that holds their keys and
// values, as far as `max_gathered` goes in one operation (HasVarlenAttention). Writes their rows of
// `out` [T, heads * Dv] and returns it; undefined: all rows are of such sequences.
at::Tensor AttendRuns(const at::Tensor& q, const std::vector<int64_t>& offsets,
                      const PagedSequences& sequences, const at::Tensor& key_cache,
                      const at::Tensor& value_cache, const AttentionScores& scores,
                      int64_t max_gathered, int64_t min_rows, at::Tensor out = {});

// Returns the gradients of causal attention for the gradient dy [T, heads * Dv] of its result. They
// do not depend on the number of threads. On the CPU without a soft cap: float32.
AttentionGradients AtenCausalAttentionBackward(const at::Tensor& dy, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const std::vector<int64_t>& offsets,
                                               const AttentionScores& scores,
                                               const SequenceTables& tables = {});

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_ATEN_ATTENTION_H_
