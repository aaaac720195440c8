// The feed-forward network down(activation(gate(x)) * up(x)) (SwiGLU, GeGLU,
// https://arxiv.org/abs/2002.05202).
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GATED_MLP_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GATED_MLP_H_

#include <memory>
#include <string>

#include "common/kernels/gate_activation.h"
#include "common/model/families/blocks/feed_forward.h"
#include "common/model/parameters/parameter_store.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/shards/tensor_parallel_group.h"

namespace tandem {

class GatedMlp : public FeedForward {
 public:
  // Takes "<prefix>gate_proj", "up_proj" and "down_proj" from `store`. `group` is nullptr for a
  // whole model.
  GatedMlp(const std::string& prefix, kernels::GateActivation activation,
           std::shared_ptr<ops::TensorParallelGroup> group, ParameterStore& store);

  at::Tensor Forward(const at::Tensor& x, const at::Tensor& residual,
                     const ModelPass& pass) const override;

 private:
  const kernels::GateActivation activation_;
  const std::shared_ptr<ops::TensorParallelGroup> group_;
  const ops::LinearWeight &gate_up_, &down_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_GATED_MLP_H_
