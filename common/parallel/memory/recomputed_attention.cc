#include "common/parallel/memory/recomputed_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "common/ops/linear/saved_object.h"

namespace tandem::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Call {
  AttentionContext& context;
  AttentionLayer layer;
  const RaggedBatch& batch;
};

class AttendFunction : public Function<AttendFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::shared_ptr<Call>& call) {
    context->save_for_backward({q, k, v});
    context->saved_data["call"] = ops::SaveObject(call);
    return call->context.Attend(call->layer, call->batch, q, k, v);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto call = ops::SavedObject<Call>(context->saved_data["call"]);
    variable_list inputs;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_());
    }
    const at::AutoGradMode with_gradients(true);
    call->context.Attend(call->layer, call->batch, inputs[0], inputs[1], inputs[2])
        .backward(gradients[0]);
    return {inputs[0].grad(), inputs[1].grad(), inputs[2].grad(), {}};
  }
};

}  // namespace

at::Tensor RecomputedAttention::Attend(const AttentionLayer& layer, const RaggedBatch& batch,
                                       const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v) {
  return AttendFunction::apply(q, k, v, std::make_shared<Call>(Call{*inside_, layer, batch}));
}

}  // namespace tandem::parallel
