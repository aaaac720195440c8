#include "common/ops/products/fixed_rows.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace tandem::ops {
namespace {

constinit int64_t product_rows = 0;

// Multiplies whole multiples of product_rows rows.
void Multiply(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight,
              const at::Tensor& bias) {
  for (int64_t row = 0; row < x.size(0); row += product_rows) {
    at::Tensor y_rows = y.narrow(0, row, product_rows);
    const at::Tensor x_rows = x.narrow(0, row, product_rows);
    if (bias.defined()) {
      at::addmm_out(y_rows, bias, x_rows, weight.t());
    } else if (y.scalar_type() == x.scalar_type()) {
      at::mm_out(y_rows, x_rows, weight.t());
    } else {
      at::mm_out(y_rows, x_rows, weight.t(), y.scalar_type());
    }
  }
}

}  // namespace

void SetProductRows(int64_t rows) {
  product_rows = rows;
  if (!at::Context::hasCuBLASLt()) return;
  // cuBLAS itself cannot be told not to divide sums; cuBLASLt can.
  const bool divides_sums = rows == 0;
  at::globalContext().setBlasPreferredBackend(divides_sums ? at::BlasBackend::Default
                                                           : at::BlasBackend::Cublaslt);
  at::globalContext().setAllowBF16ReductionCuBLAS(divides_sums, divides_sums);
}

int64_t ProductRows() { return product_rows; }

at::Tensor LinearOfFixedRows(const at::Tensor& x_in, const at::Tensor& weight,
                             const at::Tensor& bias, at::ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView no_views;  // the result is one to nobody's gradient
  const int64_t rows = x_in.size(0), padding = (product_rows - rows % product_rows) % product_rows;
  const at::Tensor x =
      padding == 0 ? x_in.contiguous() : at::constant_pad_nd(x_in, {0, 0, 0, padding});
  const at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options().dtype(type));
  Multiply(y, x, weight, bias);
  return y.narrow(0, 0, rows);
}

void LinearOfFixedRowsInto(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weight) {
  const int64_t rest = x.size(0) % product_rows, whole = x.size(0) - rest;
  Multiply(y.narrow(0, 0, whole), x.narrow(0, 0, whole), weight, /*bias=*/{});
  if (rest == 0) return;
  y.narrow(0, whole, rest)
      .copy_(LinearOfFixedRows(x.narrow(0, whole, rest), weight, /*bias=*/{}, y.scalar_type()));
}

}  // namespace tandem::ops
