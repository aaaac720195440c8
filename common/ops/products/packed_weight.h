// A matrix in a packed format: the weight of linear maps, or an embedding, that does not train.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_PACKED_WEIGHT_H_
#define TANDEM_COMMON_OPS_PRODUCTS_PACKED_WEIGHT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/kernels/cpu/packed_weight.h"
#include "common/ops/products/linear_tile.h"

namespace tandem::ops {

// The threads that pack rows or multiply.
enum class PackThreads {
  kAll,  // as many as the caller computes with (at::get_num_threads)
  kOne,  // the caller's alone, beside others that compute
};

class PackedWeight {
 public:
  // Whether this process has kernels for packed weights: with `compute.kernels: aten` it has none.
  static bool IsSupported();

  // Takes the memory (packed_memory.h) of a matrix [out, in] of zeros. `format` is packed. Throws
  // std::bad_alloc.
  PackedWeight(kernels::WeightFormat format, int64_t out, int64_t in);

  kernels::WeightFormat format() const { return matrix_.format; }
  int64_t out() const { return matrix_.out; }
  int64_t in() const { return matrix_.in; }

  // Packs `values` [n, in], of any floating-point type and device, as the rows from `first` on.
  // They are converted a few rows at a time.
  void SetRows(int64_t first, const at::Tensor& values,
               PackThreads threads = PackThreads::kAll) const;
  // Exchanges the memory of two matrices of the same format and shape. No value is read.
  void Swap(PackedWeight& other);
  // rows [T] int64 -> [T, in] float32, the values that products use. Throws c10::Error for an index
  // that is no row.
  at::Tensor Rows(const at::Tensor& rows) const;

  // Returns the first `outs` outputs of x weight^T + bias, [T, outs] float32, for x [T, in] and
  // bias [outs] or undefined. x is float32, and the result has the bits of ops::Linear with the
  // values of Rows(); or x is of RoundedRows (bfloat16_linear.h) and the matrix of kBfloat16. No
  // autograd.
  at::Tensor Linear(const at::Tensor& x, const at::Tensor& bias, int64_t outs) const;
  // Writes the tile's outputs of x weight^T to y [T, out], contiguous, on the calling thread alone.
  void MultiplyTile(const LinearTile& tile, const at::Tensor& x, const at::Tensor& y) const;
  // Writes the outputs [first, first + n) of x weight^T to y [T, n], contiguous. The same bits.
  void LinearInto(const at::Tensor& y, const at::Tensor& x, int64_t first,
                  PackThreads threads = PackThreads::kAll) const;
  // Writes the gradient by x of the outputs [first, first + n), dy W for dy [T, n] float32, to dx
  // [T, in], contiguous, or adds it. The weights are widened to float32 some outputs at a time,
  // whose products are added up in ascending order; the bits depend on the shapes, and not on the
  // threads. No autograd. Throws std::bad_alloc.
  void InputGradientInto(const at::Tensor& dx, const at::Tensor& dy, int64_t first, bool accumulate,
                         PackThreads threads = PackThreads::kAll) const;
  // Adds all outputs to `residual` [T, out] in place, and returns that.
  at::Tensor LinearAdd(const at::Tensor& residual, const at::Tensor& x,
                       const at::Tensor& bias) const;

 private:
  void Multiply(const at::Tensor& x, const at::Tensor& bias, int64_t outs, const at::Tensor& y,
                bool accumulate) const;
  template <typename Number>
  kernels::PackedLinearArgs<Number> Whole(const at::Tensor& x, const at::Tensor& bias, int64_t outs,
                                          const at::Tensor& y, bool accumulate) const;

  std::shared_ptr<void> memory_;
  kernels::PackedMatrix matrix_;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_PACKED_WEIGHT_H_
