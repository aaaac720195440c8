// The choice of experts by tokens.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTER_H_
#define TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "common/model/config/model_config.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/passes/backbone.h"
#include "common/ops/linear/linear_weight.h"

namespace tandem {

// The experts of T tokens, k each, in ascending order.
struct Routing {
  at::Tensor experts;  // [T, k] int64
  at::Tensor weights;  // [T, k] float32, of the experts' outputs
};

// Chooses for each row of `logits` [T, E] (float32) the rule's number of experts with the highest
// scores. The choice has no gradient, the weights have. `bias` [E] is added to the scores that
// choose, and not to the weights; undefined: no bias. Rows do not depend on each other. A row takes
// the experts of `given` [T, k] int64, in any order, unless they are negative; undefined: every row
// chooses. Given what it would choose, a row has the same bits.
//
// Softmax: https://arxiv.org/abs/2401.04088. Sigmoid, groups and bias:
// https://arxiv.org/abs/2412.19437; a group's score is the sum of its two highest.
Routing ChooseExperts(const at::Tensor& logits, const at::Tensor& bias, const RoutingRule& rule,
                      const at::Tensor& given = {});

// A map from hidden states to logits of the experts, with the rule that chooses.
class Router {
 public:
  // Takes "<prefix>gate" from `store`, and with RoutingRule::score_correction_bias its
  // "e_score_correction_bias". `place` counts the layers with experts before this one. `records`:
  // whether Route adds the losses of RouterLosses; among ranks that route the same tokens, one
  // does.
  Router(const RoutingRule& rule, const std::string& prefix, int64_t place, bool records,
         ParameterStore& store);

  // Chooses for the tokens x [T, H] of the pass.
  Routing Route(const at::Tensor& x, const ModelPass& pass) const;

 private:
  const RoutingRule rule_;
  const int64_t place_;
  const bool records_;
  const ops::LinearWeight& gate_;
  const at::Tensor bias_;  // [E] or undefined
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_BLOCKS_ROUTER_H_
