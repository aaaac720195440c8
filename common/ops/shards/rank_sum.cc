#include "common/ops/shards/rank_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/linear/saved_object.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Group = std::shared_ptr<TensorParallelGroup>;

at::Tensor Sum(const at::Tensor& partial, TensorParallelGroup& group) {
  const int64_t rows = partial.size(0);
  const at::Tensor partials = group.AllGather(partial.contiguous());
  at::Tensor sum = partials.narrow(0, 0, rows).to(at::kFloat);
  for (int64_t rank = 1; rank < group.size(); ++rank) {
    sum.add_(partials.narrow(0, rank * rows, rows));
  }
  return sum.to(partial.scalar_type());
}

class SumFunction : public torch::autograd::Function<SumFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial,
                            const Group& group) {
    context->saved_data["group"] = SaveObject(group);
    return Sum(partial, *group);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Group group = SavedObject<TensorParallelGroup>(context->saved_data["group"]);
    return {Sum(gradients[0], *group), {}};
  }
};

}  // namespace

at::Tensor SumInRankOrder(const at::Tensor& partial, const Group& group) {
  return at::GradMode::is_enabled() ? SumFunction::apply(partial, group) : Sum(partial, *group);
}

}  // namespace tandem::ops
