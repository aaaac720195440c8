// The operations that a vision tower needs beside those of common/ops/ops.h. They have gradients,
// and on the CPU in float32 the bits of a row depend on that row alone: packed images give the
// numbers of each image alone.
#ifndef TANDEM_COMMON_MODEL_VISION_VISION_OPS_H_
#define TANDEM_COMMON_MODEL_VISION_VISION_OPS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem {

// x Phi(x) with the error function (https://arxiv.org/abs/1606.08415), of each value.
at::Tensor Gelu(const at::Tensor& x);

// x sigmoid(1.702 x), of each value.
at::Tensor QuickGelu(const at::Tensor& x);

// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. x [T, W].
at::Tensor LayerNorm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     double eps);

// Attention of consecutive segments of rows, each to all rows of its segment, scale 1/sqrt(D).
// q, k and v [P, heads, D] -> [P, heads * D]; `lengths` add up to P.
at::Tensor SegmentAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& lengths);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_VISION_VISION_OPS_H_
