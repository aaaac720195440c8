#include "common/model/families/blocks/gated_mlp.h"

#include <utility>

#include "common/model/families/blocks/row_parallel.h"
#include "common/ops/ops.h"

namespace tandem {

GatedMlp::GatedMlp(const std::string& prefix, kernels::GateActivation activation,
                   std::shared_ptr<ops::TensorParallelGroup> group, ParameterStore& store)
    : activation_(activation),
      group_(std::move(group)),
      gate_up_(store.TakeLinear({prefix + "gate_proj", prefix + "up_proj"})),
      down_(store.TakeLinear({prefix + "down_proj"})) {}

at::Tensor GatedMlp::Forward(const at::Tensor& x, const at::Tensor& residual,
                             const ModelPass& pass) const {
  return RowParallel(down_, ops::Gated(gate_up_.Forward(x), activation_), residual, pass, group_);
}

}  // namespace tandem
