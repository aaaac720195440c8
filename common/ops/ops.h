// The operations of a transformer.
//
// On the CPU in fp32 they run the batch-invariant kernels of common/kernels/cpu, and on a GPU those
// of common/kernels/cuda, with the same bits with and without autograd. The rest, and everything in
// bf16 on a CPU, is ATen, which accumulates in fp32 and rounds each op's result to the type of its
// input (docs/internals/kernels.md). The operations of this header do not wait for the device.
// Shapes: T rows (tokens of all sequences), D = head_dim. Tensors must have a contiguous last
// dimension.
#ifndef TANDEM_COMMON_OPS_OPS_H_
#define TANDEM_COMMON_OPS_OPS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/kernels/gate_activation.h"
#include "common/ops/attention/attention_scores.h"
#include "common/ops/attention/paged_sequences.h"
#include "common/ops/attention/sequence_tables.h"

namespace tandem::ops {

enum class KernelPath {
  kAuto,  // own kernels where the device and the type of the operands have them
  kAten,  // ATen operations even on the CPU in fp32, as on a GPU
};

// Sets the kernels of the process (kernels::UseCpuKernels): before the first operation, or in tests
// between operations. The first call also lets libtorch's vector functions choose their code, which
// must not happen on several threads at a time.
void SetKernelPath(KernelPath path);
KernelPath GetKernelPath();

// tokens [T] int64, weight [V, H] -> [T, H] in the weight's type.
at::Tensor Embedding(const at::Tensor& tokens, const at::Tensor& weight);

// Returns the given rows of x [N, W], in their order: rows [T] int64 -> [T, W].
at::Tensor SelectRows(const at::Tensor& x, const at::Tensor& rows);

// residual + x, of equal shapes. Like LinearAdd it overwrites `residual` without autograd.
at::Tensor Add(const at::Tensor& residual, const at::Tensor& x);

// x times `factor`. Overwrites `x` without autograd.
at::Tensor Scale(const at::Tensor& x, double factor);

// x [T, in], weight [out, in], bias [out] or undefined -> x weight^T + bias, [T, out].
// With the CPU kernels a row's bits are the same with and without autograd, whatever the batch.
at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// Writes Linear(x, weight) into `y` [T, out], contiguous, on the calling thread alone, for loops in
// which each thread has whole products. With the CPU kernels alone: float32 on the CPU, no
// autograd.
void LinearOnThread(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight);

// residual + Linear(x, weight, bias). Without autograd it writes the sum into `residual` and
// returns that: the caller must not need the old values.
at::Tensor LinearAdd(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias = {});

// x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension, in fp32 and then in x's
// type. x [T, W] or [T, heads, W], weight [W] of any floating-point type.
at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps, double offset = 0);

// Rotates the pairs (d, d + R/2) of the first R columns of each head of x [T, heads, D], the
// "rotate_half" convention of Hugging Face. cos and sin [T, R/2] fp32 are those of the angles.
at::Tensor RotaryEmbedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// Reorders the dimensions of x [T, heads, D] for RotaryEmbedding, where a model rotates the pairs
// (2 d, 2 d + 1) instead: the first of each pair, and then the second ones.
at::Tensor SplitPairs(const at::Tensor& x);

// Joins a [T, heads, A] and b [T, heads, B] to [T, heads, A + B].
at::Tensor JoinWidths(const at::Tensor& a, const at::Tensor& b);

using kernels::GateActivation;

// activation(gate) * up [T, I] for gate_up [T, 2 I], which has the gates in its first I columns.
at::Tensor Gated(const at::Tensor& gate_up, GateActivation activation);
inline at::Tensor SwiGlu(const at::Tensor& gate_up) {
  return Gated(gate_up, GateActivation::kSilu);
}

// Returns soft_cap tanh(x / soft_cap), which without autograd overwrites x.
at::Tensor SoftCap(const at::Tensor& x, double soft_cap);

// Causal attention within each sequence. Sequence s has the rows from offsets[s] to offsets[s + 1],
// and each row attends to the keys of its window.
// q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, Dv], Dv <= D -> [T, heads * Dv].
// With shared prefixes the keys of a sequence begin with rows of another one; a row has the bits
// that it has without. Not on a GPU in bfloat16. On a GPU with ProductRows(), without them, a row
// has the bits that it has in CachedAttention.
at::Tensor CausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::vector<int64_t>& offsets, const AttentionScores& scores = {},
                           const SequenceTables& tables = {});

// Whether CachedAttention needs PagedSequences::rows for tensors of this device and type: where it
// runs in ATen operations or in kernels of a GPU.
bool NeedsPagedRows(at::Device device, at::ScalarType type);

// Attention of new rows to a cache: the rows [offsets[s], offsets[s + 1]) continue sequence s at
// position starts[s]. Writes k and v into the blocks of the sequences, rounded to the type of the
// cache, then attends to what the cache holds for the positions of each row's window. Blocks before
// the window of a sequence's first new row are not read. key_cache and value_cache [blocks,
// kv_heads, tokens in a block, D or Dv], device of q, fp32 or bf16 -> [T, heads * Dv] in q's type.
// The value cache may be columns of the key cache; `v` then is the same columns of `k`. No
// autograd.
at::Tensor CachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::vector<int64_t>& offsets, const PagedSequences& sequences,
                           const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const AttentionScores& scores = {});

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_OPS_H_
