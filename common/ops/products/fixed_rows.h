// Products of one number of rows on a GPU, whatever the pass. cuBLAS chooses a kernel, and with it
// the order of sums, by the shape of a product: with one shape the bits of a row do not depend on
// the other rows of its pass.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_FIXED_ROWS_H_
#define TANDEM_COMMON_OPS_PRODUCTS_FIXED_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem::ops {

// Sets the number of rows of each product of a linear map in a forward pass on a GPU: a pass is
// divided, and its last product padded. 0, as at first: one product of all rows. Other numbers also
// keep cuBLAS from dividing the sums of bfloat16 products (split-K), by which their bits would
// depend on the shape. Attention on a GPU computes every row by itself then (CausalAttention and
// CachedAttention of ops.h). A setting of the process, before its first operation, or in tests
// between operations.
void SetProductRows(int64_t rows);
int64_t ProductRows();

// Returns x weight^T + bias [T, out] by products of ProductRows() rows: x [T, in], weight [out,
// in], bias [out] or undefined. `type` is that of x or, without a bias, float32. No autograd.
at::Tensor LinearOfFixedRows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             at::ScalarType type);

// Writes x weight^T to y [T, out], in y's type, by the same products.
void LinearOfFixedRowsInto(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_FIXED_ROWS_H_
