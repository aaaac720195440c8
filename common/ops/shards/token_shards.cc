#include "common/ops/shards/token_shards.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/linear/saved_object.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using Group = std::shared_ptr<TensorParallelGroup>;

void Save(AutogradContext& context, const Group& group, int64_t tokens) {
  context.saved_data["group"] = SaveObject(group);
  context.saved_data["tokens"] = tokens;
}

TensorParallelGroup& GroupOf(AutogradContext& context) {
  return *SavedObject<TensorParallelGroup>(context.saved_data["group"]);
}

at::Tensor Gather(const at::Tensor& shard, int64_t tokens, TensorParallelGroup& group) {
  return group.AllGather(shard.contiguous()).narrow(0, 0, tokens);
}

at::Tensor Scatter(const at::Tensor& partial, TensorParallelGroup& group) {
  const int64_t remainder = partial.size(0) % group.size();
  if (remainder == 0) return group.ReduceScatter(partial.contiguous());
  std::vector<int64_t> padding = partial.sizes().vec();
  padding[0] = group.size() - remainder;
  return group.ReduceScatter(at::cat({partial, at::zeros(padding, partial.options())}));
}

class GatherFunction : public Function<GatherFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& shard, int64_t tokens,
                            const Group& group) {
    Save(*context, group, tokens);
    return Gather(shard, tokens, *group);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {Scatter(gradients[0], GroupOf(*context)), {}, {}};
  }
};

class ScatterFunction : public Function<ScatterFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial,
                            const Group& group) {
    Save(*context, group, partial.size(0));
    return Scatter(partial, *group);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {Gather(gradients[0], context->saved_data["tokens"].toInt(), GroupOf(*context)), {}};
  }
};

class DivideGradientFunction : public Function<DivideGradientFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    return x.view_as(x);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] / context->saved_data["ranks"].toInt(), {}};
  }
};

}  // namespace

at::Tensor GatherTokens(const at::Tensor& shard, int64_t tokens, const Group& group) {
  return GatherFunction::apply(shard, tokens, group);
}

at::Tensor ScatterSum(const at::Tensor& partial, const Group& group) {
  return ScatterFunction::apply(partial, group);
}

at::Tensor DivideGradient(const at::Tensor& x, const TensorParallelGroup& group) {
  return DivideGradientFunction::apply(x, group.size());
}

}  // namespace tandem::ops
