#include "common/ops/products/matrix_rows.h"

#include <ATen/ATen.h>

#include "common/ops/ops.h"
#include "common/ops/products/fixed_rows.h"
#include "common/ops/products/matrix_product.h"

namespace tandem::ops {

int64_t MatrixRows::size(int64_t dimension) const {
  if (packed_ == nullptr) return dense_.size(dimension);
  return dimension == 0 ? count_ : packed_->in();
}

at::TensorOptions MatrixRows::options() const {
  return packed_ != nullptr ? at::TensorOptions().dtype(at::kFloat) : dense_.options();
}

const at::Tensor& MatrixRows::dense() const {
  TORCH_CHECK(packed_ == nullptr, "the weight is packed, so it has no dense matrix");
  return dense_;
}

MatrixRows MatrixRows::Narrow(int64_t first, int64_t count) const {
  if (packed_ == nullptr) return dense_.narrow(0, first, count);
  TORCH_CHECK(first >= 0 && count >= 0 && first + count <= count_, count, " rows from ", first,
              " on of ", count_);
  MatrixRows rows = *this;
  rows.first_ += first;
  rows.count_ = count;
  return rows;
}

void MatrixRows::MultiplyInto(const at::Tensor& product, const at::Tensor& x) const {
  if (packed_ != nullptr) return packed_->LinearInto(product, x, first_);
  if (ProductRows() > 0 && !product.is_cpu()) return LinearOfFixedRowsInto(product, x, dense_);
  MatrixProductInto(product, x, dense_.t());
}

void MatrixRows::LinearOnThread(const at::Tensor& product, const at::Tensor& x) const {
  if (packed_ != nullptr) return packed_->LinearInto(product, x, first_, PackThreads::kOne);
  ops::LinearOnThread(product, x, dense_);
}

void MatrixRows::InputGradientInto(const at::Tensor& dx, const at::Tensor& dz, bool accumulate,
                                   PackThreads threads) const {
  if (packed_ != nullptr) return packed_->InputGradientInto(dx, dz, first_, accumulate, threads);
  (threads == PackThreads::kOne ? MatrixProductOnThread : MatrixProductInto)(dx, dz, dense_,
                                                                             accumulate);
}

}  // namespace tandem::ops
