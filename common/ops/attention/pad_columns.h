// Zeros for the columns that a fused kernel wants and a tensor lacks.
#ifndef TANDEM_COMMON_OPS_ATTENTION_PAD_COLUMNS_H_
#define TANDEM_COMMON_OPS_ATTENTION_PAD_COLUMNS_H_

#include <ATen/ATen.h>

#include <cstdint>

namespace tandem::ops {

// Returns x [.., width] with zeros up to `width`.
inline at::Tensor PadColumns(const at::Tensor& x, int64_t width) {
  return x.size(-1) == width ? x : at::constant_pad_nd(x, {0, width - x.size(-1)});
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_PAD_COLUMNS_H_
