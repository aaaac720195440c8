// Linear maps whose input the ranks of a sharded model divide
// (https://arxiv.org/abs/1909.08053), as every sublayer of a decoder ends with one.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_PARALLEL_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_PARALLEL_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/model/passes/backbone.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/ops.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

// Returns residual + map(x), or map(x) if `residual` is undefined. x [T, in] has this rank's
// columns; the result is as sharded as the residual of the pass. `group` is nullptr for a whole
// model; then `residual` is overwritten without autograd.
inline at::Tensor RowParallel(const ops::LinearWeight& map, const at::Tensor& x,
                              const at::Tensor& residual, const ModelPass& pass,
                              const std::shared_ptr<ops::TensorParallelGroup>& group) {
  if (group == nullptr) return residual.defined() ? map.ForwardAdd(residual, x) : map.Forward(x);
  const at::Tensor output =
      pass.shards_tokens ? map.ForwardShard(x, group) : map.ForwardSum(x, group);
  return residual.defined() ? ops::Add(residual, output) : output;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROW_PARALLEL_H_
