// Collectives between the ranks that hold the shards of one model
// (https://arxiv.org/abs/1909.08053). The interface is in common/ops because the decoder and the
// output loss both need it; common/ranks implements it.
#ifndef TANDEM_COMMON_OPS_SHARDS_TENSOR_PARALLEL_GROUP_H_
#define TANDEM_COMMON_OPS_SHARDS_TENSOR_PARALLEL_GROUP_H_

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

  // Returns the `shard` [n, ...] of every rank, one after the other: [size * n, ...].
  virtual at::Tensor AllGather(const at::Tensor& shard) = 0;
  // Returns this rank's shard [n, ...] of the sum over the ranks of `whole` [size * n, ...].
  virtual at::Tensor ReduceScatter(const at::Tensor& whole) = 0;
  // Return the elementwise sum or maximum over the ranks, in the shape of `values`, with the same
  // bits on every rank.
  virtual at::Tensor Sum(const at::Tensor& values) = 0;
  virtual at::Tensor Max(const at::Tensor& values) = 0;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_SHARDS_TENSOR_PARALLEL_GROUP_H_
