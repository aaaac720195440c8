// Tensors as kernels read them: with contiguous numbers where a kernel steps from one to the next.
#ifndef TANDEM_COMMON_OPS_PACKED_H_
#define TANDEM_COMMON_OPS_PACKED_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// Returns `x`, or a copy if its last dimension is not contiguous.
inline at::Tensor Packed(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Returns x [T, heads, D], or a copy if the heads of a row are not contiguous.
inline at::Tensor HeadsPacked(const at::Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PACKED_H_
