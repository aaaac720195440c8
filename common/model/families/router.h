// The choice of experts by tokens.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_ROUTER_H_
#define TANDEM_COMMON_MODEL_FAMILIES_ROUTER_H_

#include <ATen/core/Tensor.h>

#include <string>

#include "common/model/model_config.h"
#include "common/model/parameter_store.h"
#include "common/ops/linear_weight.h"

namespace tandem {

// The experts of T tokens, k each, in ascending order.
struct Routing {
  at::Tensor experts;  // [T, k] int64
  at::Tensor weights;  // [T, k] float32, of the experts' outputs
};

// Chooses for each row of `logits` [T, E] (float32) the rule's number of experts with the highest
// scores. The choice has no gradient, the weights have. `bias` [E] is added to the scores that
// choose, and not to the weights; undefined: no bias. Rows do not depend on each other.
//
// Softmax: https://arxiv.org/abs/2401.04088. Sigmoid, groups and bias:
// https://arxiv.org/abs/2412.19437; a group's score is the sum of its two highest.
Routing ChooseExperts(const at::Tensor& logits, const at::Tensor& bias, const RoutingRule& rule);

// A map from hidden states to logits of the experts, with the rule that chooses.
class Router {
 public:
  // Takes "<prefix>gate" from `store`, and with RoutingRule::score_correction_bias its
  // "e_score_correction_bias".
  Router(const RoutingRule& rule, const std::string& prefix, ParameterStore& store);

  // x [T, H]
  Routing Route(const at::Tensor& x) const;

 private:
  const RoutingRule rule_;
  const ops::LinearWeight& gate_;
  const at::Tensor bias_;  // [E] or undefined
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_ROUTER_H_
