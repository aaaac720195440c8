// The ranks that hold the parts of one model (https://arxiv.org/abs/1909.08053), as those who
// compute with a part see them. It lies in common/ops because the decoder and the output loss both
// need it and neither knows the other; what carries the data is chosen elsewhere.
#ifndef TANDEM_COMMON_OPS_TENSOR_PARALLEL_GROUP_H_
#define TANDEM_COMMON_OPS_TENSOR_PARALLEL_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem::ops {

// All ranks call the same methods in the same order, with tensors of the same size and type, on the
// device of the model. Methods that move tensors throw c10::Error; then the group is unusable.
class TensorParallelGroup {
 public:
  virtual ~TensorParallelGroup() = default;

  virtual int64_t size() const = 0;
  virtual int64_t rank() const = 0;

  // The `part` [n, ...] of every rank, one after the other: [size * n, ...].
  virtual at::Tensor AllGather(const at::Tensor& part) = 0;
  // Of the sum over the ranks of `whole` [size * n, ...], this rank's part: [n, ...].
  virtual at::Tensor ReduceScatter(const at::Tensor& whole) = 0;
  // The elementwise sum or maximum over the ranks, in the shape of `values`; the same bits
  // everywhere.
  virtual at::Tensor Sum(const at::Tensor& values) = 0;
  virtual at::Tensor Max(const at::Tensor& values) = 0;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_TENSOR_PARALLEL_GROUP_H_
