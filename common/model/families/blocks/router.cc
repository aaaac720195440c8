#include "common/model/families/blocks/router.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "common/model/families/blocks/row_sigmoid.h"
#include "common/model/passes/router_losses.h"

namespace tandem {
namespace {

// Returns the scores by which a token chooses, without those of groups that it leaves out.
at::Tensor InBestGroups(const at::Tensor& scores, const RoutingRule& rule) {
  if (rule.n_group == 1) return scores;
  constexpr int64_t kScoresOfGroup = 2;
  const int64_t size = rule.num_experts / rule.n_group;
  const at::Tensor groups = scores.unflatten(1, {rule.n_group, size});
  const at::Tensor sums = std::get<0>(at::topk(groups, kScoresOfGroup, -1)).sum(-1);
  const at::Tensor best = std::get<1>(at::topk(sums, rule.topk_group, -1));
  const at::Tensor left_out = at::ones(sums.sizes(), scores.options().dtype(at::kBool))
                                  .scatter_(1, best, false)
                                  .unsqueeze(-1)
                                  .expand(groups.sizes())
                                  .reshape(scores.sizes());
  return scores.masked_fill(left_out, -std::numeric_limits<double>::infinity());
}

}  // namespace

Routing ChooseExperts(const at::Tensor& logits, const at::Tensor& bias, const RoutingRule& rule,
                      const at::Tensor& given) {
  const at::Tensor scores =
      rule.score == RouterScore::kSoftmax ? at::softmax(logits, -1) : RowSigmoid(logits);
  Routing routing;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor choosing =
        InBestGroups(bias.defined() ? scores + bias.to(scores.scalar_type()) : scores, rule);
    at::Tensor chosen = std::get<1>(at::topk(choosing, rule.num_experts_per_tok, -1));
    if (given.defined()) chosen = at::where(given.lt(0), chosen, given);
    routing.experts = std::get<0>(chosen.sort(-1));
  }
  routing.weights = scores.gather(1, routing.experts);
  if (rule.norm_topk_prob) {
    // Adds one after the other, whatever the number of tokens.
    const int64_t last = rule.num_experts_per_tok - 1;
    at::Tensor sum = at::cumsum(routing.weights, -1).narrow(1, last, 1);
    if (rule.score == RouterScore::kSigmoid) sum = sum + 1e-20;  // all may be 0
    routing.weights = routing.weights / sum;
  }
  if (rule.routed_scaling_factor != 1.0) {
    routing.weights = routing.weights * rule.routed_scaling_factor;
  }
  return routing;
}

Router::Router(const RoutingRule& rule, const std::string& prefix, int64_t place, bool records,
               ParameterStore& store)
    : rule_(rule),
      place_(place),
      records_(records),
      gate_(store.TakeLinear({prefix + "gate"})),
      bias_(store.Take(prefix + "gate.e_score_correction_bias")) {}

Routing Router::Route(const at::Tensor& x, const ModelPass& pass) const {
  // As the routers of `transformers`: those with sigmoids multiply in float32, whatever the type of
  // the model.
  const at::Tensor logits =
      rule_.score == RouterScore::kSigmoid ? gate_.BaseFloat32(x) : gate_.Base(x).to(at::kFloat);
  const BatchRouting& batch = pass.batch.routing;
  Routing routing = ChooseExperts(
      logits, bias_, rule_,
      batch.given.defined() ? batch.given.select(1, place_).to(at::kLong) : at::Tensor());
  if (batch.chosen != nullptr) {
    (*batch.chosen)[static_cast<size_t>(place_)] = routing.experts;
  }
  RouterLosses* const losses = batch.losses.get();
  if (losses != nullptr && records_) {
    routing.weights = losses->Record(place_, routing.weights, logits, routing.experts, pass);
  }
  return routing;
}

}  // namespace tandem
