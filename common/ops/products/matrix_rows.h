// Consecutive rows of a matrix that is dense or packed, as a rank has them of an output layer.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_MATRIX_ROWS_H_
#define TANDEM_COMMON_OPS_PRODUCTS_MATRIX_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "common/ops/products/packed_weight.h"

namespace tandem::ops {

// Rows W [n, in]. They share the memory of the matrix. Packed ones count as float32 on the CPU. No
// autograd.
class MatrixRows {
 public:
  MatrixRows() = default;  // not defined
  // NOLINTNEXTLINE(google-explicit-constructor): a dense matrix is the usual one.
  MatrixRows(const at::Tensor& dense) : dense_(dense.defined() ? dense.detach() : dense) {}
  explicit MatrixRows(std::shared_ptr<const PackedWeight> packed)
      : packed_(std::move(packed)), count_(packed_->out()) {}

  bool defined() const { return packed_ != nullptr || dense_.defined(); }
  // Number of dimensions: 2, unless a dense matrix is none.
  int64_t dim() const { return packed_ != nullptr ? 2 : dense_.dim(); }
  int64_t size(int64_t dimension) const;
  bool is_contiguous() const { return packed_ != nullptr || dense_.is_contiguous(); }
  at::ScalarType scalar_type() const { return options().dtype().toScalarType(); }
  at::Device device() const { return packed_ != nullptr ? at::Device(at::kCPU) : dense_.device(); }
  bool is_cpu() const { return device().is_cpu(); }
  at::TensorOptions options() const;
  // Returns the matrix; throws c10::Error if it is packed.
  const at::Tensor& dense() const;

  MatrixRows Narrow(int64_t first, int64_t count) const;

  // Writes x W^T to `product` [T, n], contiguous, as MatrixProductInto does; packed rows in the
  // order of sums of ops::Linear, and so on a GPU with ProductRows().
  void MultiplyInto(const at::Tensor& product, const at::Tensor& x) const;
  // The same in the order of sums of LinearOnThread, on the calling thread alone; float32.
  void LinearOnThread(const at::Tensor& product, const at::Tensor& x) const;
  // Writes dz W to dx [T, in], or adds it; on all threads (MatrixProductInto) or the caller's
  // alone.
  void InputGradientInto(const at::Tensor& dx, const at::Tensor& dz, bool accumulate,
                         PackThreads threads = PackThreads::kAll) const;

 private:
  at::Tensor dense_;
  std::shared_ptr<const PackedWeight> packed_;
  int64_t first_ = 0, count_ = 0;  // of the packed matrix
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_MATRIX_ROWS_H_
