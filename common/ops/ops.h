// The operations a transformer is made of, and the one place where a kernel is chosen.
//
// On the CPU in fp32 they run the batch-invariant kernels of common/kernels/cpu, with the same bits
// with and without autograd. Everywhere else, on a GPU or in bf16, all of them are ATen, which
// accumulates in fp32 and rounds each op's result to the type of its input. Nothing waits for the
// device. Shapes: T rows (tokens of all sequences), D = head_dim. Tensors must have a contiguous
// last dimension.
#ifndef TANDEM_COMMON_OPS_OPS_H_
#define TANDEM_COMMON_OPS_OPS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

enum class KernelPath {
  kAuto,  // the fastest that the device and type of the operands have
  kAten,  // ATen even on the CPU in fp32: what a GPU runs
};

// The choice of the whole process; to be made before the first operation.
void SetKernelPath(KernelPath path);
KernelPath GetKernelPath();

// tokens [T] int64, weight [V, H] -> [T, H] in the weight's type.
at::Tensor Embedding(const at::Tensor& tokens, const at::Tensor& weight);

// x [T, in], weight [out, in], bias [out] or undefined -> x weight^T + bias, [T, out].
// With the CPU kernels a row's bits are the same with and without autograd, whatever the batch.
at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// residual + Linear(x, weight, bias). Without autograd the sum is written into `residual`, which
// is returned: the caller must not need its old values.
at::Tensor LinearAdd(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias = {});

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 and then in x's type.
// x [T, W] or [T, heads, W], weight [W] of any floating-point type.
at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps);

// Rotates x [T, heads, D] by the angles whose cosines and sines are cos and sin [T, D/2] fp32, in
// pairs (d, d + D/2): the "rotate_half" convention of Hugging Face.
at::Tensor RotaryEmbedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// silu(gate) * up: [T, 2 I], the gates beside the ups -> [T, I].
at::Tensor SwiGlu(const at::Tensor& gate_up);

// Causal attention inside each of the sequences that `offsets` delimits, scale 1/sqrt(D).
// q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads * D].
at::Tensor CausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::vector<int64_t>& offsets);

// Rows [offsets[s], offsets[s+1]) continue the sequence in slot slots[s] of a cache at position
// starts[s]. Writes k and v there, then attends to everything up to each row's own position.
// key_cache and value_cache [slots, kv_heads, max_len, D], device and type of q -> [T, heads * D].
// No autograd.
at::Tensor CachedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::vector<int64_t>& offsets, const std::vector<int64_t>& slots,
                           const std::vector<int64_t>& starts, const at::Tensor& key_cache,
                           const at::Tensor& value_cache);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_OPS_H_
