// Attention to a paged cache with the project's kernel of a GPU, which reads keys and values where
// they are.
#ifndef TANDEM_COMMON_OPS_ATTENTION_DEVICE_ATTENTION_H_
#define TANDEM_COMMON_OPS_ATTENTION_DEVICE_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/paged_sequences.h"
#include "common/ops/attention/sequence_tables.h"

namespace tandem::ops {

// The sequences with at most this many new rows attend in the kernel where FlashAttention takes the
// others (HasVarlenAttention); where it takes none, and with ProductRows(), all sequences do.
inline constexpr int64_t kFewRows = 16;

// Whether a kernel is there and takes queries [T, heads, D] and caches like these: float32 or
// bfloat16, at most 256 columns, and values that lie as the keys do (not latent attention).
bool HasDeviceAttention(const at::Tensor& q, const at::Tensor& key_cache,
                        const at::Tensor& value_cache);
// The same of queries and keys of these types and columns, whose values lie as the keys do.
bool HasDeviceAttention(at::Device device, at::ScalarType type, at::ScalarType cache_type,
                        int64_t head_dim);

// CachedAttention of ops.h. The bits of a row in the kernel depend on its query, keys and values
// alone. Its launches are three, whatever the sequences. A plan that the sequences bring
// (PagedSequences::kernel_plans) is taken as it is.
at::Tensor DeviceCachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::vector<int64_t>& offsets,
                                 const PagedSequences& sequences, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, const AttentionScores& scores);

// Whether CausalAttention takes the kernel, by which a row has the bits that it has in
// DeviceCachedAttention: with ProductRows(), for operands like these and no shared prefixes.
bool AttendsByRow(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const SequenceTables& tables);

// CausalAttention of ops.h in the kernel, from a copy of keys and values in blocks. No autograd.
at::Tensor DeviceCausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::vector<int64_t>& offsets, const AttentionScores& scores,
                                 const SequenceTables& tables);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_DEVICE_ATTENTION_H_
