#include "common/ops/rank_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace tandem::ops {

at::Tensor SumInRankOrder(const at::Tensor& partial, TensorParallelGroup& group) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "a sum in the order of the ranks has no gradient");
  const int64_t rows = partial.size(0);
  const at::Tensor partials = group.AllGather(partial.contiguous());
  at::Tensor sum = partials.narrow(0, 0, rows).to(at::kFloat);
  for (int64_t rank = 1; rank < group.size(); ++rank) {
    sum.add_(partials.narrow(0, rank * rows, rows));
  }
  return sum.to(partial.scalar_type());
}

}  // namespace tandem::ops
