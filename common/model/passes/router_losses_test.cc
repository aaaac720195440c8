#include "common/model/passes/router_losses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/families/blocks/router.h"

namespace tandem {
namespace {

constexpr int64_t kExperts = 7;
constexpr RouterLosses::Scales kScales = {.load_balancing = 0.03, .z = 0.002};

ExpertOptions OneLayer(RouterScore score) {
  return {.routing = {.num_experts = kExperts, .num_experts_per_tok = 3, .score = score}};
}

// The two losses of logits [T, E] whose tokens belong to sequences of these lengths, by the
// formulas, in the type of the logits. The number of choices of each expert is a constant.
struct Oracle {
  at::Tensor balance, z;
};
Oracle LossesOf(const at::Tensor& logits, const at::Tensor& experts,
                const std::vector<int64_t>& lengths, RouterScore score) {
  Oracle losses = {.balance = at::zeros({}, logits.options()),
                   .z = at::log(at::exp(logits).sum(1)).pow(2).sum()};
  const at::Tensor chosen =
      at::zeros(logits.sizes(), logits.options().requires_grad(false)).scatter(1, experts, 1);
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    const at::Tensor x = logits.narrow(0, begin, length);
    const at::Tensor scores = score == RouterScore::kSoftmax ? at::exp(x) : 1 / (1 + at::exp(-x));
    const at::Tensor p = scores / scores.sum(1, /*keepdim=*/true);
    const at::Tensor f = chosen.narrow(0, begin, length).mean(0);
    // T times the loss of the sequence.
    losses.balance =
        losses.balance + static_cast<double>(length) * kExperts * (f * p.mean(0)).sum();
    begin += length;
  }
  return losses;
}

struct Routed {
  at::Tensor logits, gradient;
  Routing routing;
  std::shared_ptr<RouterLosses> losses;
};

// Routes random tokens of these sequences. The gradient is that of the losses and sum(weights * w).
Routed RouteOf(RouterScore score, const std::vector<int64_t>& lengths,
               const RouterLosses::Scales& scales, const at::Tensor& w) {
  const ExpertOptions experts = OneLayer(score);
  std::vector<std::vector<int64_t>> tokens;
  for (const int64_t length : lengths) tokens.emplace_back(static_cast<size_t>(length), 1);
  const RaggedBatch batch = MakeRaggedBatch(tokens);
  CausalContext context;
  const ModelPass pass = {.batch = batch, .context = context, .rows = {}, .rotation = {}};
  Routed run;
  run.losses = std::make_shared<RouterLosses>(experts, 1, scales, at::kCPU);
  run.logits = (at::randn({batch.num_tokens(), kExperts}) * 2).requires_grad_();
  run.routing = ChooseExperts(run.logits, {}, experts.routing);
  const at::Tensor weights =
      run.losses->Record(0, run.routing.weights, run.logits, run.routing.experts, pass);
  EXPECT_TRUE(at::equal(weights, run.routing.weights));
  (weights * w).sum().backward();
  run.gradient = run.logits.grad();
  return run;
}

TEST(RouterLossesTest, SumsAndGradientsAreThoseOfTheFormulasInFloat64) {
  at::manual_seed(3);
  const std::vector<int64_t> lengths = {5, 1, 12};
  const at::Tensor w = at::randn({18, 3});
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    const Routed run = RouteOf(score, lengths, kScales, w);
    const at::Tensor x = run.logits.detach().to(at::kDouble).requires_grad_();
    const Oracle oracle = LossesOf(x, run.routing.experts, lengths, score);
    const at::Tensor sums = run.losses->sums()[0];
    EXPECT_NEAR(sums[kExperts].item<double>(), oracle.balance.item<double>(),
                1e-6 * oracle.balance.item<double>());
    EXPECT_NEAR(sums[kExperts + 1].item<double>(), oracle.z.item<double>(),
                1e-6 * oracle.z.item<double>());
    EXPECT_TRUE(
        at::equal(sums.narrow(0, 0, kExperts),
                  at::bincount(run.routing.experts.flatten(), {}, kExperts).to(at::kDouble)));

    const at::Tensor scores = score == RouterScore::kSoftmax ? at::softmax(x, 1) : at::sigmoid(x);
    ((scores.gather(1, run.routing.experts) * w).sum() + kScales.load_balancing * oracle.balance +
     kScales.z * oracle.z)
        .backward();
    EXPECT_TRUE(at::allclose(run.gradient.to(at::kDouble), x.grad(), 1e-5, 1e-6));
  }
}

TEST(RouterLossesTest, WithoutCoefficientsTheGradientKeepsItsBits) {
  at::manual_seed(5);
  const at::Tensor w = at::randn({9, 3});
  const Routed run = RouteOf(RouterScore::kSoftmax, {9}, {}, w);
  const at::Tensor x = run.logits.detach().requires_grad_();
  (ChooseExperts(x, {}, OneLayer(RouterScore::kSoftmax).routing).weights * w).sum().backward();
  EXPECT_TRUE(at::equal(run.gradient, x.grad()));
}

// A batch is the sum of its sequences: neither micro-batches nor ranks change the loss.
TEST(RouterLossesTest, SequencesAddUp) {
  const at::Tensor w = at::zeros({17, 3});
  at::manual_seed(7);
  const Routed together = RouteOf(RouterScore::kSoftmax, {6, 11}, kScales, w);
  const ExpertOptions experts = OneLayer(RouterScore::kSoftmax);
  at::Tensor sums = at::zeros_like(together.losses->sums());
  std::vector<at::Tensor> gradients;
  CausalContext context;
  int64_t begin = 0;
  for (const int64_t length : {6, 11}) {
    const RaggedBatch batch =
        MakeRaggedBatch({std::vector<int64_t>(static_cast<size_t>(length), 1)});
    const ModelPass pass = {.batch = batch, .context = context, .rows = {}, .rotation = {}};
    at::Tensor logits = together.logits.detach().narrow(0, begin, length).clone().requires_grad_();
    RouterLosses losses(experts, 1, kScales, at::kCPU);
    const Routing routing = ChooseExperts(logits, {}, experts.routing);
    // Twice, as with recomputed activations.
    losses.Record(0, routing.weights, logits, routing.experts, pass);
    (losses.Record(0, routing.weights, logits, routing.experts, pass) * 0).sum().backward();
    sums += losses.sums();
    gradients.push_back(logits.grad());
    begin += length;
  }
  EXPECT_TRUE(at::allclose(sums, together.losses->sums(), 1e-6, 0));
  EXPECT_TRUE(at::allclose(at::cat(gradients), together.gradient, 1e-6, 1e-9));
}

// Losses, loads and gradients of a shared prefix are the sums over the sequences that have it.
TEST(RouterLossesTest, ASharedTokenCountsInEachOfItsSequences) {
  at::manual_seed(9);
  const ExpertOptions experts = OneLayer(RouterScore::kSoftmax);
  const std::vector<std::vector<int64_t>> tokens = {{1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}, {1, 1, 1}};
  // Rows of the shared batch: 0-4, 5-7 behind the first three, 8 behind the first two.
  const at::Tensor rows = at::tensor({0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 0, 1, 8}, at::kLong);
  const at::Tensor logits = at::randn({9, kExperts}) * 2;
  CausalContext context;
  const auto run = [&](const RaggedBatch& batch, const at::Tensor& of_rows) {
    const ModelPass pass = {.batch = batch, .context = context, .rows = {}, .rotation = {}};
    const auto losses = std::make_shared<RouterLosses>(experts, 1, kScales, at::kCPU);
    const Routing routing = ChooseExperts(of_rows, {}, experts.routing);
    (losses->Record(0, routing.weights, of_rows, routing.experts, pass) * 0).sum().backward();
    return losses->sums();
  };
  const at::Tensor apart = logits.clone().requires_grad_(),
                   shared = logits.clone().requires_grad_();
  const at::Tensor expected = run(MakeRaggedBatch(tokens), apart.index_select(0, rows));
  const at::Tensor sums = run(MakeRaggedBatch(tokens, at::kCPU, {0, 3, 2}), shared);
  EXPECT_TRUE(at::allclose(sums, expected, 1e-6, 0));
  EXPECT_TRUE(at::allclose(shared.grad(), apart.grad(), 1e-5, 1e-8));
}

// Experts that are taken equally often, and scores that are equal: k for each token.
TEST(RouterLossesTest, ABalancedLayerHasTheSmallestLoss) {
  const ExpertOptions experts = {.routing = {.num_experts = 6, .num_experts_per_tok = 2}};
  const RaggedBatch batch = MakeRaggedBatch({{1, 1, 1}});
  CausalContext context;
  const ModelPass pass = {.batch = batch, .context = context, .rows = {}, .rotation = {}};
  RouterLosses losses(experts, 1, {}, at::kCPU);
  const at::Tensor chosen = at::tensor({0, 1, 2, 3, 4, 5}, at::kLong).view({3, 2});
  losses.Record(0, at::ones({3, 2}), at::zeros({3, 6}), chosen, pass);
  EXPECT_NEAR(losses.sums()[0][6].item<double>(), 3 * 2, 1e-5);
}

}  // namespace
}  // namespace tandem
