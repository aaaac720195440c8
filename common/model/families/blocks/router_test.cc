#include "common/model/families/blocks/router.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/model/families/blocks/row_sigmoid.h"

namespace tandem {
namespace {

struct Case {
  const char* name;
  RoutingRule rule;
};

std::vector<Case> Cases() {
  return {
      {"mixtral", {.num_experts = 8, .num_experts_per_tok = 2, .norm_topk_prob = true}},
      {"plain", {.num_experts = 13, .num_experts_per_tok = 5}},
      {"deepseek",
       {.num_experts = 12,
        .num_experts_per_tok = 3,
        .score = RouterScore::kSigmoid,
        .norm_topk_prob = true,
        .routed_scaling_factor = 2.5,
        .n_group = 4,
        .topk_group = 2,
        .score_correction_bias = true}},
      {"sigmoid_plain",
       {.num_experts = 12,
        .num_experts_per_tok = 3,
        .score = RouterScore::kSigmoid,
        .routed_scaling_factor = 0.5}},
  };
}

// One token's weights by expert, 0 for those that it does not take, in float64.
std::vector<double> Oracle(const std::vector<double>& logits, const std::vector<double>& bias,
                           const RoutingRule& rule) {
  const auto count = static_cast<size_t>(rule.num_experts);
  std::vector<double> scores(count);
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit);
  for (size_t e = 0; e < count; ++e) {
    scores[e] = rule.score == RouterScore::kSoftmax ? std::exp(logits[e]) / sum
                                                    : 1 / (1 + std::exp(-logits[e]));
  }
  std::vector<double> choosing = scores;
  for (size_t e = 0; e < bias.size(); ++e) choosing[e] += bias[e];
  const auto best = [](const std::vector<double>& of, int64_t k) {
    std::vector<size_t> order(of.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](size_t a, size_t b) { return of[a] > of[b]; });
    order.resize(static_cast<size_t>(k));
    return order;
  };
  if (rule.n_group > 1) {
    const auto size = count / static_cast<size_t>(rule.n_group);
    std::vector<double> groups;
    for (size_t g = 0; g < count; g += size) {
      const std::vector<double> group(choosing.begin() + static_cast<std::ptrdiff_t>(g),
                                      choosing.begin() + static_cast<std::ptrdiff_t>(g + size));
      const auto two = best(group, 2);
      groups.push_back(group[two[0]] + group[two[1]]);
    }
    const auto chosen = best(groups, rule.topk_group);
    for (size_t e = 0; e < count; ++e) {
      if (std::ranges::find(chosen, e / size) == chosen.end()) choosing[e] = -INFINITY;
    }
  }
  std::vector<double> weights(count);
  double chosen_sum = 0;
  const auto chosen = best(choosing, rule.num_experts_per_tok);
  for (const size_t e : chosen) chosen_sum += scores[e];
  for (const size_t e : chosen) {
    weights[e] = scores[e] / (rule.norm_topk_prob ? chosen_sum : 1) * rule.routed_scaling_factor;
  }
  return weights;
}

TEST(RouterTest, WeightsAreThoseOfTheRule) {
  at::manual_seed(2);
  constexpr int64_t kTokens = 40;
  for (const auto& [name, rule] : Cases()) {
    const at::Tensor logits = at::randn({kTokens, rule.num_experts}) * 2;
    const at::Tensor bias =
        rule.score_correction_bias ? at::randn({rule.num_experts}) * 0.3 : at::Tensor();
    const Routing routing = ChooseExperts(logits, bias, rule);
    const at::Tensor dense = at::zeros(logits.sizes()).scatter(1, routing.experts, routing.weights);
    EXPECT_TRUE(routing.experts.diff(1, 1).gt(0).all().item<bool>()) << "ascending, " << name;
    std::vector<double> biases;
    if (bias.defined()) {
      for (int64_t e = 0; e < rule.num_experts; ++e) biases.push_back(bias[e].item<double>());
    }
    for (int64_t t = 0; t < kTokens; ++t) {
      std::vector<double> row;
      for (int64_t e = 0; e < rule.num_experts; ++e) row.push_back(logits[t][e].item<double>());
      const std::vector<double> expected = Oracle(row, biases, rule);
      for (int64_t e = 0; e < rule.num_experts; ++e) {
        EXPECT_NEAR(dense[t][e].item<double>(), expected[static_cast<size_t>(e)], 1e-6)
            << name << ", token " << t << ", expert " << e;
      }
    }
  }
}

TEST(RouterTest, ATokensBitsDoNotDependOnTheOthers) {
  at::manual_seed(4);
  for (const auto& [name, rule] : Cases()) {
    const at::Tensor logits = at::randn({67, rule.num_experts}) * 2;
    const at::Tensor bias =
        rule.score_correction_bias ? at::randn({rule.num_experts}) * 0.3 : at::Tensor();
    const Routing all = ChooseExperts(logits, bias, rule);
    for (const int64_t count : {1, 2, 3, 7, 8, 16, 33}) {
      for (int64_t begin = 0; begin + count <= 67; begin += count) {
        const Routing some = ChooseExperts(logits.narrow(0, begin, count), bias, rule);
        EXPECT_TRUE(at::equal(some.experts, all.experts.narrow(0, begin, count))) << name;
        EXPECT_TRUE(at::equal(some.weights, all.weights.narrow(0, begin, count))) << name;
      }
    }
  }
}

TEST(RouterTest, AChoiceThatIsGivenHasTheSameBits) {
  at::manual_seed(5);
  for (const auto& [name, rule] : Cases()) {
    const at::Tensor logits = at::randn({23, rule.num_experts}) * 2;
    const at::Tensor bias =
        rule.score_correction_bias ? at::randn({rule.num_experts}) * 0.3 : at::Tensor();
    const Routing chosen = ChooseExperts(logits, bias, rule);
    at::Tensor given = chosen.experts.flip(1);  // in any order
    given.narrow(0, 20, 3).fill_(-1);           // and not for every row
    const Routing replayed = ChooseExperts(logits, bias, rule, given);
    EXPECT_TRUE(at::equal(replayed.experts, chosen.experts)) << name;
    EXPECT_TRUE(at::equal(replayed.weights, chosen.weights)) << name;
  }
}

// The weights of experts that the router would not have chosen are functions of its logits.
TEST(RouterTest, GivenExpertsAreWeighedByTheLogits) {
  at::manual_seed(7);
  constexpr int64_t kTokens = 11;
  for (const auto& [name, rule] : Cases()) {
    const at::Tensor logits = at::randn({kTokens, rule.num_experts}).requires_grad_();
    const at::Tensor given = std::get<0>(at::rand({kTokens, rule.num_experts})
                                             .argsort(/*dim=*/int64_t{1}, /*descending=*/false)
                                             .narrow(1, 0, rule.num_experts_per_tok)
                                             .sort(-1));
    const Routing routing = ChooseExperts(logits, {}, rule, given);
    EXPECT_TRUE(at::equal(routing.experts, given)) << name;

    const at::Tensor x = logits.detach().to(at::kDouble).requires_grad_();
    const at::Tensor scores =
        rule.score == RouterScore::kSoftmax ? at::softmax(x, -1) : at::sigmoid(x);
    at::Tensor weights = scores.gather(1, given);
    if (rule.norm_topk_prob) weights = weights / weights.sum(-1, true);
    weights = weights * rule.routed_scaling_factor;
    EXPECT_TRUE(at::allclose(routing.weights.to(at::kDouble), weights, 1e-5, 1e-7)) << name;
    const at::Tensor w = at::randn(weights.sizes());
    (routing.weights * w).sum().backward();
    (weights * w).sum().backward();
    EXPECT_TRUE(at::allclose(logits.grad().to(at::kDouble), x.grad(), 1e-4, 1e-6)) << name;
  }
}

TEST(RowSigmoidTest, ValuesGradientsAndBits) {
  at::manual_seed(6);
  at::Tensor x = (at::randn({41, 1}) * 20).requires_grad_();
  const at::Tensor y = RowSigmoid(x);
  const at::Tensor expected = at::sigmoid(x.detach().to(at::kDouble));
  EXPECT_TRUE(at::allclose(y.detach().to(at::kDouble), expected, 1e-6, 0));
  y.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), expected * (1 - expected), 1e-5, 1e-7));
  for (int64_t t = 0; t < 41; ++t) {
    EXPECT_TRUE(at::equal(RowSigmoid(x.detach()[t]), y.detach()[t]));
  }
}

}  // namespace
}  // namespace tandem
