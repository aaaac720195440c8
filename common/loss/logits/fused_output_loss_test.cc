// The fused loss against an oracle: whole logits in float64 and autograd.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "common/base/errors/error.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "common/loss/supervised_loss.h"
#include "common/loss/testing/float64.h"
#include "common/ops/linear/bfloat16_linear.h"

namespace tandem::loss {
namespace {

constexpr int64_t kRows = 13, kHidden = 7, kVocabulary = 19;

std::vector<double> Host(const at::Tensor& t) {
  const at::Tensor c = t.to(at::kDouble).contiguous();
  return {c.data_ptr<double>(), c.data_ptr<double>() + c.numel()};
}

// A batch of three sequences (5 + 6 + 2 response tokens) with both authors.
struct Problem {
  explicit Problem(double junior_weight = 0.3) {
    at::manual_seed(7);
    hidden = at::randn({kRows, kHidden}, at::kDouble);
    weight = at::randn({kVocabulary, kHidden}, at::kDouble);
    const at::Tensor drawn = at::randint(kVocabulary, {kRows}, at::kLong);
    for (int64_t row = 0; row < kRows; ++row) {
      rows.positions.push_back(row);
      rows.labels.push_back(drawn[row].item<int64_t>());
    }
    rows.temperatures = Host(at::rand({kRows}, at::kDouble) + 0.5);
    const at::Tensor logprobs = LogProbs();
    tokens.old_logprobs = Host(logprobs + 0.4 * at::randn({kRows}, at::kDouble));
    tokens.reference = Host(logprobs + 0.4 * at::randn({kRows}, at::kDouble));
    tokens.behaviour = Host(logprobs + 0.4 * at::randn({kRows}, at::kDouble));
    tokens.advantages = Host(at::randn({kRows}, at::kDouble));
    for (int64_t t = 0; t < kRows; ++t) {
      tokens.authorship.push_back(t % 3 != 1);
      weights.push_back(t % 3 != 1 ? 1.0 : junior_weight);
    }
  }

  at::Tensor LogSoftmax(const at::Tensor& h, const at::Tensor& w) const {
    at::Tensor logits = h.matmul(w.t());
    if (soft_cap.has_value()) logits = *soft_cap * at::tanh(logits / *soft_cap);
    return at::log_softmax(logits / Vector(rows.temperatures).unsqueeze(1), 1);
  }
  at::Tensor Labels() const { return at::tensor(rows.labels, at::kLong).unsqueeze(1); }
  at::Tensor LogProbs() const { return LogSoftmax(hidden, weight).gather(1, Labels()).squeeze(1); }

  at::Tensor hidden, weight;
  std::optional<double> soft_cap;
  OutputRows rows;
  PolicyTokens tokens;
  std::vector<double> weights;
  std::vector<int64_t> lengths = {5, 6, 2};
};

struct Gradients {
  double loss = 0;
  at::Tensor hidden, weight;
};

// Aggregates by the definitions, with tensors and autograd.
at::Tensor Aggregate(const at::Tensor& terms, const Problem& p, const LossScaleOptions& options) {
  const at::Tensor w = Vector(p.weights);
  at::Tensor counted = w;
  if (options.normalizer == Normalizer::kAllTokens) counted = at::ones_like(w);
  if (options.normalizer == Normalizer::kNonzeroWeight) counted = (w > 0).to(at::kDouble);
  const at::Tensor weighted = terms * w;
  if (options.aggregation == Aggregation::kTokenSum) return weighted.sum();
  if (options.aggregation == Aggregation::kTokenMean) return weighted.sum() / counted.sum();
  at::Tensor total = at::zeros({}, at::kDouble);
  double sequences = 0;
  int64_t begin = 0;
  for (int64_t length : p.lengths) {
    const at::Tensor count = counted.narrow(0, begin, length).sum();
    at::Tensor sum = weighted.narrow(0, begin, length).sum();
    begin += length;
    if (count.item<double>() == 0) continue;
    sequences += 1;
    if (options.aggregation == Aggregation::kSeqMeanTokenMean) sum = sum / count;
    if (options.aggregation == Aggregation::kSeqMeanTokenSumNorm) sum = sum / options.norm_constant;
    total = total + sum;
  }
  return total / sequences;
}

Gradients Oracle(const Problem& p, const PolicyLossOptions& options,
                 const LossScaleOptions& scale_options) {
  at::Tensor h = p.hidden.detach().clone().requires_grad_();
  at::Tensor w = p.weight.detach().clone().requires_grad_();
  const at::Tensor log_softmax = p.LogSoftmax(h, w);
  const at::Tensor logp = log_softmax.gather(1, p.Labels()).squeeze(1);
  const at::Tensor entropy = -(log_softmax.exp() * log_softmax).sum(1);
  const at::Tensor old = Vector(p.tokens.old_logprobs), advantage = Vector(p.tokens.advantages);
  const at::Tensor ratio = (logp - old).clamp(-20, 20).exp();
  at::Tensor policy =
      -at::min(ratio * advantage,
               ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high) * advantage);
  if (options.dual_clip > 0) {
    policy = at::where(advantage < 0, at::min(policy, -advantage * options.dual_clip), policy);
  }
  if (options.importance_sampling_cap > 0) {
    const at::Tensor weight = (old - Vector(p.tokens.behaviour)).exp();
    const at::Tensor inside =
        weight.clamp(options.importance_sampling_floor, options.importance_sampling_cap);
    const bool mask = options.importance_sampling_mode == ImportanceSamplingMode::kMask;
    policy = policy * (mask ? at::where(inside == weight, weight, 0.0) : inside);
  }
  if (options.off_policy_mask_threshold > 0) {
    const at::Tensor gap = (Vector(p.tokens.behaviour) - logp).detach();
    std::vector<at::Tensor> means;
    for (const at::Tensor& of : gap.split_with_sizes(p.lengths)) {
      means.push_back(of.mean().expand(of.sizes()));
    }
    const at::Tensor off = at::cat(means) > options.off_policy_mask_threshold;
    policy = policy * off.logical_and(advantage < 0).logical_not();
  }
  const at::Tensor d = logp - Vector(p.tokens.reference);
  const at::Tensor k2 = 0.5 * d * d;
  at::Tensor k3 = (-d).exp() + d - 1;
  if (options.k3_cap > 0) k3 = k3.clamp_max(options.k3_cap);
  at::Tensor kl = at::zeros_like(d);
  switch (options.kl_estimator) {
    case KlEstimator::kNone:
      break;
    case KlEstimator::kK1:
      kl = d;
      break;
    case KlEstimator::kK2:
      kl = k2;
      break;
    case KlEstimator::kK3:
      kl = k3;
      break;
    case KlEstimator::kK1GradientK2:
      kl = k2 - k2.detach() + d.detach();
      break;
    case KlEstimator::kK3GradientK2:
      kl = k2 - k2.detach() + k3.detach();
      break;
  }
  if (options.kl_importance_correction) kl = kl * ratio;
  const at::Tensor loss =
      Aggregate(policy + options.kl_coefficient * kl - options.entropy_coefficient * entropy, p,
                scale_options);
  loss.backward();
  return {loss.item<double>(), h.grad(), w.grad()};
}

// A way to compute the loss.
struct Way {
  LossImpl impl = LossImpl::kAuto;
  LossMode mode = LossMode::kAuto;
  int64_t chunk_size = 4096;
  at::Device device = at::kCPU;
};

Gradients Fused(Problem p, const PolicyLossOptions& options, const LossScaleOptions& scale_options,
                at::ScalarType type, const Way& way = {}) {
  p.tokens.scales = ComputeLossScales(scale_options, p.weights, p.lengths).value().scales;
  const at::Tensor hidden = p.hidden.to(way.device, type), weight = p.weight.to(way.device, type);
  auto loss = LinearCrossEntropyLoss::Create(
                  weight, {.impl = way.impl, .chunk_size = way.chunk_size, .soft_cap = p.soft_cap})
                  .value();
  OutputGradients gradients = {.hidden = at::zeros_like(hidden), .weight = at::zeros_like(weight)};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, p.tokens).value();
  const absl::Status status = loss->ForwardBackward(
      hidden, p.rows, [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
      gradients, way.mode);
  EXPECT_TRUE(status.ok()) << status;
  return {evaluator.Metrics().loss_total, gradients.hidden.cpu(), gradients.weight.cpu()};
}

void ExpectClose(const Gradients& actual, const Gradients& expected, double tolerance) {
  EXPECT_NEAR(actual.loss, expected.loss, tolerance);
  EXPECT_LT(MaxDifference(actual.hidden, expected.hidden), tolerance);
  EXPECT_LT(MaxDifference(actual.weight, expected.weight), tolerance);
}

const Way kWays[] = {
    {LossImpl::kTiles, LossMode::kGradientInForward}, {LossImpl::kTiles, LossMode::kRecompute},
    {LossImpl::kRows, LossMode::kGradientInForward},  {LossImpl::kRows, LossMode::kRecompute},
    {LossImpl::kAten, LossMode::kGradientInForward},  {LossImpl::kAten, LossMode::kRecompute}};

constexpr Aggregation kAggregations[] = {
    Aggregation::kTokenMean, Aggregation::kTokenSum, Aggregation::kSeqMeanTokenSum,
    Aggregation::kSeqMeanTokenMean, Aggregation::kSeqMeanTokenSumNorm};
constexpr Normalizer kNormalizers[] = {Normalizer::kAllTokens, Normalizer::kNonzeroWeight,
                                       Normalizer::kSumOfWeights};
constexpr KlEstimator kEstimators[] = {KlEstimator::kNone,         KlEstimator::kK1,
                                       KlEstimator::kK2,           KlEstimator::kK3,
                                       KlEstimator::kK1GradientK2, KlEstimator::kK3GradientK2};

TEST(FusedOutputLossTest, EqualsTheOracleForEveryAggregationNormalizerAndKl) {
  for (double junior_weight : {0.0, 0.3}) {
    const Problem problem(junior_weight);
    for (Aggregation aggregation : kAggregations) {
      for (Normalizer normalizer : kNormalizers) {
        for (KlEstimator estimator : kEstimators) {
          const PolicyLossOptions options = {.clip_ratio_low = 0.1,
                                             .clip_ratio_high = 0.3,
                                             .kl_estimator = estimator,
                                             .kl_coefficient = 0.2,
                                             .entropy_coefficient = 0.05};
          const LossScaleOptions scale = {aggregation, normalizer, 8};
          SCOPED_TRACE(testing::Message()
                       << static_cast<int>(aggregation) << " " << static_cast<int>(normalizer)
                       << " " << static_cast<int>(estimator) << " " << junior_weight);
          const Gradients expected = Oracle(problem, options, scale);
          ExpectClose(Fused(problem, options, scale, at::kDouble), expected, 1e-12);
          for (const Way& way : kWays) {
            SCOPED_TRACE(testing::Message()
                         << LossImplName(way.impl) << " " << static_cast<int>(way.mode));
            ExpectClose(Fused(problem, options, scale, at::kFloat, way), expected, 3e-5);
          }
        }
      }
    }
  }
}

TEST(FusedOutputLossTest, DualClipAndImportanceWeightEqualTheOracle) {
  const Problem problem;
  const PolicyLossOptions options = {.dual_clip = 1.1, .importance_sampling_cap = 1.2};
  ExpectClose(Fused(problem, options, {}, at::kDouble), Oracle(problem, options, {}), 1e-12);
}

TEST(FusedOutputLossTest, ASoftCapOfTheLogitsEqualsTheOracle) {
  Problem problem;
  const PolicyLossOptions options = {.entropy_coefficient = 0.2};
  const double uncapped = Oracle(problem, options, {}).loss;
  problem.soft_cap = 2.0;  // of logits of magnitude 2.6
  const Gradients expected = Oracle(problem, options, {});
  EXPECT_GT(std::abs(expected.loss - uncapped), 1e-2);
  ExpectClose(Fused(problem, options, {}, at::kDouble), expected, 1e-12);
  for (const Way& way : kWays) {
    SCOPED_TRACE(testing::Message() << LossImplName(way.impl) << " " << static_cast<int>(way.mode));
    ExpectClose(Fused(problem, options, {}, at::kFloat, way), expected, 3e-5);
  }
}

// The rows begin within a panel.
TEST(FusedOutputLossTest, PackedRowsHaveTheBitsAndTheGradientsOfTheirValues) {
  if (!ops::PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  for (const auto format : {kernels::WeightFormat::kBfloat16, kernels::WeightFormat::kInt8}) {
    Problem p;
    const auto packed = std::make_shared<const ops::PackedWeight>(format, kVocabulary + 5, kHidden);
    packed->SetRows(3, p.weight);
    const ops::MatrixRows rows = ops::MatrixRows(packed).Narrow(3, kVocabulary);
    const at::Tensor values = packed->Rows(at::arange(3, 3 + kVocabulary, at::kLong));
    const at::Tensor hidden = p.hidden.to(at::kFloat);
    p.weight = values.to(at::kDouble);
    const PolicyLossOptions options = {.entropy_coefficient = 0.2};
    const Gradients expected = Oracle(p, options, {});
    p.tokens.scales = ComputeLossScales({}, p.weights, p.lengths).value().scales;
    for (const Way& way : kWays) {
      SCOPED_TRACE(testing::Message()
                   << LossImplName(way.impl) << " " << static_cast<int>(way.mode));
      auto loss = LinearCrossEntropyLoss::Create(rows, {.impl = way.impl, .chunk_size = 5}).value();
      auto dense = LinearCrossEntropyLoss::Create(values, {.impl = way.impl}).value();
      OutputGradients gradients = {.hidden = at::zeros_like(hidden)};
      PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, p.tokens).value();
      ASSERT_TRUE(loss->ForwardBackward(
                          hidden, p.rows,
                          [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                          gradients, way.mode)
                      .ok());
      EXPECT_NEAR(evaluator.Metrics().loss_total, expected.loss, 3e-5);
      EXPECT_LT(MaxDifference(gradients.hidden, expected.hidden), 3e-5);
      if (way.impl != LossImpl::kTiles) continue;
      EXPECT_EQ(loss->LogProbs(hidden, p.rows).value().logprobs,
                dense->LogProbs(hidden, p.rows).value().logprobs);
    }
  }
}

TEST(FusedOutputLossTest, K3CutEqualsTheOracle) {
  const Problem problem;
  for (const KlEstimator estimator : {KlEstimator::kK3, KlEstimator::kK3GradientK2}) {
    PolicyLossOptions options = {.kl_estimator = estimator, .kl_coefficient = 0.7, .k3_cap = 0.05};
    const Gradients cut = Fused(problem, options, {}, at::kDouble);
    ExpectClose(cut, Oracle(problem, options, {}), 1e-12);
    options.k3_cap = 0;
    EXPECT_GT(std::abs(Fused(problem, options, {}, at::kDouble).loss - cut.loss), 1e-3);
  }
}

TEST(FusedOutputLossTest, TheCorrectedKlEqualsTheOracle) {
  const Problem problem;
  for (const KlEstimator estimator : kEstimators) {
    const PolicyLossOptions options = {
        .kl_estimator = estimator, .kl_coefficient = 0.7, .kl_importance_correction = true};
    ExpectClose(Fused(problem, options, {}, at::kDouble), Oracle(problem, options, {}), 1e-12);
  }
}

// Masked tokens stay in the divisor of a mean, whatever the normalizer counts.
TEST(FusedOutputLossTest, MaskedImportanceWeightsEqualTheOracle) {
  const Problem problem;
  const PolicyLossOptions options = {.kl_estimator = KlEstimator::kK3,
                                     .kl_coefficient = 0.2,
                                     .importance_sampling_cap = 1.2,
                                     .importance_sampling_floor = 0.8,
                                     .importance_sampling_mode = ImportanceSamplingMode::kMask};
  for (const Aggregation aggregation : kAggregations) {
    for (const Normalizer normalizer : kNormalizers) {
      const LossScaleOptions scale = {aggregation, normalizer, 8};
      ExpectClose(Fused(problem, options, scale, at::kDouble), Oracle(problem, options, scale),
                  1e-12);
    }
  }
}

TEST(FusedOutputLossTest, TheOffPolicyMaskEqualsTheOracle) {
  Problem problem;
  problem.tokens.sequence_rows = problem.lengths;
  for (size_t t = 5; t < 11; ++t) problem.tokens.behaviour[t] += 1;  // the second sequence
  PolicyLossOptions options = {
      .kl_estimator = KlEstimator::kK3, .kl_coefficient = 0.2, .entropy_coefficient = 0.1};
  const double without = Oracle(problem, options, {}).loss;
  options.off_policy_mask_threshold = 0.5;
  const Gradients masked = Oracle(problem, options, {});
  EXPECT_GT(std::abs(masked.loss - without), 1e-3);
  const Way whole = {.mode = LossMode::kRecompute};
  ExpectClose(Fused(problem, options, {}, at::kDouble, whole), masked, 1e-12);
}

TEST(FusedOutputLossTest, GradientEqualsDifferences) {
  Problem problem;
  const PolicyLossOptions options = {.clip_ratio_low = 0.9,
                                     .clip_ratio_high = 9,
                                     .kl_estimator = KlEstimator::kK3,
                                     .kl_coefficient = 0.2,
                                     .entropy_coefficient = 0.1};
  const Gradients gradients = Fused(problem, options, {}, at::kDouble);
  const double h = 1e-6;
  for (int64_t i = 0; i < kHidden; ++i) {
    Problem up = problem, down = problem;
    up.hidden = problem.hidden.clone();
    down.hidden = problem.hidden.clone();
    up.hidden[3][i] += h;
    down.hidden[3][i] -= h;
    const double numeric =
        (Fused(up, options, {}, at::kDouble).loss - Fused(down, options, {}, at::kDouble).loss) /
        (2 * h);
    EXPECT_NEAR(gradients.hidden[3][i].item<double>(), numeric, 1e-8);
  }
}

TEST(FusedOutputLossTest, ChunksDoNotChangeTheResult) {
  const Problem problem;
  const PolicyLossOptions options = {.entropy_coefficient = 0.1};
  const Gradients whole = Fused(problem, options, {}, at::kDouble);
  for (const int64_t chunk : {1, 2, 5}) {
    for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
      const Way way = {.mode = mode, .chunk_size = chunk};
      ExpectClose(Fused(problem, options, {}, at::kDouble, way), whole, 1e-13);
    }
  }
}

TEST(FusedOutputLossTest, RowsMayBeSplitReorderedAndSelected) {
  // The same rows in two calls and reverse order; positions point into a larger hidden.
  Problem p;
  p.tokens.scales = ComputeLossScales({}, p.weights, p.lengths).value().scales;
  auto loss = LinearCrossEntropyLoss::Create(p.weight).value();
  const Gradients whole = Fused(p, {}, {}, at::kDouble);

  OutputGradients gradients = {.hidden = at::zeros({kRows, kHidden}, at::kDouble),
                               .weight = at::zeros({kVocabulary, kHidden}, at::kDouble)};
  double total = 0;
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{6, kRows}, {0, 6}}) {
    std::vector<int64_t> order(static_cast<size_t>(end - begin));
    std::iota(order.rbegin(), order.rend(), begin);
    PolicyTokens tokens;
    OutputRows rows;
    for (int64_t row : order) {
      const auto t = static_cast<size_t>(row);
      tokens.old_logprobs.push_back(p.tokens.old_logprobs[t]);
      tokens.advantages.push_back(p.tokens.advantages[t]);
      tokens.scales.push_back(p.tokens.scales[t]);
      rows.positions.push_back(row);
      rows.labels.push_back(p.rows.labels[t]);
      rows.temperatures.push_back(p.rows.temperatures[t]);
    }
    PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, tokens).value();
    ASSERT_TRUE(loss->ForwardBackward(
                        p.hidden, rows,
                        [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                        gradients)
                    .ok());
    total += evaluator.Metrics().loss_total;
  }
  EXPECT_NEAR(total, whole.loss, 1e-13);
  EXPECT_LT(MaxDifference(gradients.hidden, whole.hidden), 1e-13);
  EXPECT_LT(MaxDifference(gradients.weight, whole.weight), 1e-13);
}

TEST(FusedOutputLossTest, FirstStepHasRatioOneAndNoKl) {
  Problem p;
  auto loss = LinearCrossEntropyLoss::Create(p.weight.to(at::kFloat)).value();
  const at::Tensor hidden = p.hidden.to(at::kFloat);
  p.tokens.old_logprobs = loss->LogProbs(hidden, p.rows).value().logprobs;
  p.tokens.reference = p.tokens.old_logprobs;
  p.tokens.scales = ComputeLossScales({}, p.weights, p.lengths).value().scales;
  const PolicyLossOptions options = {.kl_estimator = KlEstimator::kK3, .kl_coefficient = 1};
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create(options, p.tokens).value();
  OutputGradients none;
  ASSERT_TRUE(loss->ForwardBackward(
                      hidden, p.rows,
                      [&](auto... arguments) { return evaluator.Evaluate(arguments...); }, none)
                  .ok());
  EXPECT_EQ(evaluator.Metrics().mean_ratio, 1);
  EXPECT_LT(std::abs(evaluator.Metrics().ppo_kl), 1e-8);
  EXPECT_LT(std::abs(evaluator.Metrics().kl_to_ref), 1e-8);
  EXPECT_EQ(evaluator.Metrics().clip_fraction, 0);
}

TEST(FusedOutputLossTest, WeightZeroTokensHaveExactlyZeroGradient) {
  Problem p;
  std::fill(p.weights.begin(), p.weights.end(), 0.0);
  const Gradients gradients =
      Fused(p, {.kl_estimator = KlEstimator::kK3, .kl_coefficient = 1, .entropy_coefficient = 1},
            {}, at::kFloat);
  EXPECT_EQ(gradients.loss, 0);
  EXPECT_EQ(gradients.hidden.abs().max().item<double>(), 0);
  EXPECT_EQ(gradients.weight.abs().max().item<double>(), 0);
}

TEST(FusedOutputLossTest, SupervisedLossIsCrossEntropy) {
  Problem p(1.0);
  std::vector<double> scales(kRows, 1.0 / kRows);
  at::Tensor h = p.hidden.clone().requires_grad_();
  const at::Tensor expected = -p.LogSoftmax(h, p.weight).gather(1, p.Labels()).mean();
  expected.backward();
  SupervisedLossEvaluator evaluator(scales);
  auto loss = LinearCrossEntropyLoss::Create(p.weight).value();
  OutputGradients gradients = {.hidden = at::zeros({kRows, kHidden}, at::kDouble)};
  ASSERT_TRUE(loss->ForwardBackward(
                      p.hidden, p.rows,
                      [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                      gradients)
                  .ok());
  EXPECT_NEAR(evaluator.loss(), expected.item<double>(), 1e-12);
  EXPECT_LT(MaxDifference(gradients.hidden, h.grad()), 1e-12);
}

TEST(FusedOutputLossTest, LogProbsEqualTheOracle) {
  Problem p;
  for (const std::optional<double> soft_cap : {std::optional<double>(), {2.0}}) {
    p.soft_cap = soft_cap;
    auto loss =
        LinearCrossEntropyLoss::Create(p.weight, {.chunk_size = 4, .soft_cap = soft_cap}).value();
    const RowLogProbs statistics = loss->LogProbs(p.hidden, p.rows).value();
    const at::Tensor log_softmax = p.LogSoftmax(p.hidden, p.weight);
    EXPECT_LT(MaxDifference(Vector(statistics.logprobs), p.LogProbs()), 1e-12);
    EXPECT_LT(
        MaxDifference(Vector(statistics.entropies), -(log_softmax.exp() * log_softmax).sum(1)),
        1e-12);
  }
}

TEST(FusedOutputLossTest, LargeLogitsStayFinite) {
  Problem p;
  auto loss = LinearCrossEntropyLoss::Create((p.weight * 1e4).to(at::kFloat)).value();
  const RowLogProbs statistics = loss->LogProbs(p.hidden.to(at::kFloat), p.rows).value();
  for (double logprob : statistics.logprobs) EXPECT_TRUE(std::isfinite(logprob));
  for (double entropy : statistics.entropies) EXPECT_TRUE(std::isfinite(entropy));
}

// Compares a loss of bf16 weights or hidden states with that of the same numbers in float64. The
// tolerance covers rounding the gradients of the logits and of the hidden states to bf16.
void ExpectRoundedLoss(const Problem& p, LinearCrossEntropyLoss& loss, const at::Tensor& hidden,
                       LossMode mode, const at::Tensor& logprobs, const Gradients& expected) {
  const RowLogProbs statistics = loss.LogProbs(hidden, p.rows).value();
  EXPECT_LT(MaxDifference(Vector(statistics.logprobs), logprobs), 1e-5);
  PolicyLossEvaluator evaluator = PolicyLossEvaluator::Create({}, p.tokens).value();
  OutputGradients gradients = {.hidden = at::zeros_like(hidden),
                               .weight = at::zeros({kVocabulary, kHidden})};
  ASSERT_TRUE(loss.ForwardBackward(
                      hidden, p.rows,
                      [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                      gradients, mode)
                  .ok());
  EXPECT_NEAR(evaluator.Metrics().loss_total, expected.loss, 1e-5);
  const auto close = [](const at::Tensor& actual, const at::Tensor& wanted) {
    return MaxDifference(actual, wanted) / wanted.abs().max().item<double>();
  };
  EXPECT_LT(close(gradients.hidden, expected.hidden), 1e-2);
  EXPECT_LT(close(gradients.weight, expected.weight), 1e-2);
}

TEST(FusedOutputLossTest, HiddenStatesAndWeightMayBeBfloat16) {
  Problem p;
  p.soft_cap = 4.0;
  p.hidden = p.hidden.to(at::kBFloat16).to(at::kDouble);
  p.weight = p.weight.to(at::kBFloat16).to(at::kDouble);
  const at::Tensor logprobs = p.LogProbs();
  p.tokens.scales = ComputeLossScales({}, p.weights, p.lengths).value().scales;
  const Gradients expected = Fused(p, {}, {}, at::kDouble);
  for (const at::ScalarType weight_type : {at::kBFloat16, at::kFloat}) {
    auto loss =
        LinearCrossEntropyLoss::Create(p.weight.to(weight_type), {.soft_cap = p.soft_cap}).value();
    const at::Tensor hidden = p.hidden.to(at::kBFloat16);
    ExpectRoundedLoss(p, *loss, hidden, LossMode::kAuto, logprobs, expected);
  }
}

// A head that rounds float32 hidden states, beside the same with the rounded values in float64.
TEST(FusedOutputLossTest, ABfloat16HeadRoundsFloat32HiddenStates) {
  Problem p;
  const at::Tensor hidden = p.hidden.to(at::kFloat);
  const at::Tensor weight = ops::Bfloat16Rows(kVocabulary, kHidden).copy_(p.weight);
  p.hidden = p.hidden.to(at::kBFloat16).to(at::kDouble);
  p.weight = weight.to(at::kDouble);
  const at::Tensor logprobs = p.LogProbs();
  p.tokens.scales = ComputeLossScales({}, p.weights, p.lengths).value().scales;
  const Gradients expected = Fused(p, {}, {}, at::kDouble);
  for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
    auto loss = LinearCrossEntropyLoss::Create(weight).value();
    ExpectRoundedLoss(p, *loss, hidden, mode, logprobs, expected);
  }
}

// A vocabulary of several tiles, the last one narrow, and labels in all of them.
TEST(FusedOutputLossTest, TilesOfTheVocabularyEqualTheWhole) {
  Problem p;
  constexpr int64_t kTokens = 2 * kTileColumns + 907;
  p.weight = at::randn({kTokens, kHidden}, at::kDouble);
  for (int64_t row = 0; row < kRows; ++row) {
    p.rows.labels[static_cast<size_t>(row)] = row * (kTokens - 1) / (kRows - 1);
  }
  p.tokens.old_logprobs.clear();  // they were those of another layer
  const PolicyLossOptions options = {.entropy_coefficient = 0.1};
  const Gradients expected = Fused(p, options, {}, at::kDouble);
  for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
    const Way way = {.impl = LossImpl::kTiles, .mode = mode, .chunk_size = 5};
    ExpectClose(Fused(p, options, {}, at::kFloat, way), expected, 3e-5);
  }
  p.soft_cap = 3.0;
  const Gradients capped = Fused(p, options, {}, at::kDouble);
  ExpectClose(Fused(p, options, {}, at::kFloat, {.impl = LossImpl::kTiles, .chunk_size = 5}),
              capped, 3e-5);
}

TEST(FusedOutputLossTest, LabelsWithTheGreatestLogitAreCounted) {
  Problem p;
  constexpr int64_t kTokens = 2 * kTileColumns + 907;
  p.weight = at::randn({kTokens, kHidden}, at::kDouble).to(at::kFloat).to(at::kDouble);
  p.hidden = p.hidden.to(at::kFloat).to(at::kDouble);
  const at::Tensor greatest = p.hidden.matmul(p.weight.t()).argmax(1);
  constexpr int64_t kRight = 4;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t label = greatest[row].item<int64_t>();
    p.rows.labels[static_cast<size_t>(row)] = row < kRight ? label : (label + 1) % kTokens;
  }
  const auto none = [](auto&&...) { return absl::OkStatus(); };
  for (const LossImpl impl : {LossImpl::kTiles, LossImpl::kRows, LossImpl::kAten}) {
    auto loss =
        LinearCrossEntropyLoss::Create(p.weight.to(at::kFloat), {.impl = impl, .chunk_size = 5})
            .value();
    EXPECT_EQ(loss->LogProbs(p.hidden.to(at::kFloat), p.rows)->num_greatest, kRight);
    for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
      OutputGradients gradients;
      int64_t found = -1;
      ASSERT_TRUE(
          loss->ForwardBackward(p.hidden.to(at::kFloat), p.rows, none, gradients, mode, &found)
              .ok());
      EXPECT_EQ(found, kRight);
    }
  }
}

TEST(FusedOutputLossTest, EqualsTheOracleOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
  const Problem problem;
  const PolicyLossOptions options = {.entropy_coefficient = 0.05};
  const Gradients expected = Oracle(problem, options, {});
  for (Way way : kWays) {
    way.device = at::kCUDA;
    for (const int64_t chunk_size : {4096, 5}) {  // one chunk, and several whose gradients add up
      way.chunk_size = chunk_size;
      SCOPED_TRACE(testing::Message() << LossImplName(way.impl) << " " << static_cast<int>(way.mode)
                                      << " " << chunk_size);
      ExpectClose(Fused(problem, options, {}, at::kFloat, way), expected, 3e-5);
    }
  }
  const auto chosen = LinearCrossEntropyLoss::Create(problem.weight.to(at::kCUDA, at::kFloat));
  EXPECT_EQ((*chosen)->impl(), LossImpl::kRows);
}

TEST(FusedOutputLossTest, ALossOfSequencesSeesAllRowsAtOnce) {
  const Problem p;
  auto loss = LinearCrossEntropyLoss::Create(p.weight, {.chunk_size = 4}).value();
  OutputGradients none;
  const auto sizes = [&](LossMode mode) {
    std::vector<size_t> seen;
    const absl::Status status = loss->ForwardBackward(
        p.hidden, p.rows,
        [&](int64_t, absl::Span<const double> logprobs, auto...) {
          seen.push_back(logprobs.size());
          return absl::OkStatus();
        },
        none, mode);
    EXPECT_TRUE(status.ok()) << status;
    return seen;
  };
  EXPECT_EQ(sizes(LossMode::kRecompute), std::vector<size_t>{kRows});
  EXPECT_EQ(sizes(LossMode::kGradientInForward), (std::vector<size_t>{4, 4, 4, 1}));
}

// The group of this rank and another one, which holds the same shard of the vocabulary.
class TwoRanks : public ops::TensorParallelGroup {
 public:
  explicit TwoRanks(bool other_prefers_recompute) : other_(other_prefers_recompute) {}
  int64_t size() const override { return 2; }
  int64_t rank() const override { return 0; }
  at::Tensor AllGather(const at::Tensor& shard) override { return at::cat({shard, shard}); }
  at::Tensor ReduceScatter(const at::Tensor& whole) override { return 2 * whole.chunk(2)[0]; }
  at::Tensor Sum(const at::Tensor& values) override { return 2 * values; }
  at::Tensor Max(const at::Tensor& values) override {
    const bool is_preference = values.numel() == 1;
    return is_preference && other_ ? at::ones_like(values) : values;
  }

 private:
  const bool other_;
};

VocabularyShard ShardOfTwoRanks(bool other_prefers_recompute) {
  return {.group = std::make_shared<TwoRanks>(other_prefers_recompute),
          .first = 0,
          .size = 2 * kVocabulary,
          .most_rows = kVocabulary};
}

// Returns the number of rows in each call of the function of a loss, in LossMode::kAuto.
std::vector<size_t> RowsPerCall(at::ScalarType type, VocabularyShard shard = {},
                                LossImpl impl = LossImpl::kTiles) {
  constexpr int64_t kManyRows = 130;
  at::manual_seed(3);
  OutputRows rows;
  for (int64_t row = 0; row < kManyRows; ++row) {
    rows.positions.push_back(row);
    rows.labels.push_back(row % kVocabulary);
  }
  const at::Tensor weight = at::randn({kVocabulary, kHidden}).to(type);
  auto loss = LinearCrossEntropyLoss::Create(
                  weight, {.impl = impl, .chunk_size = 65, .vocabulary = std::move(shard)})
                  .value();
  OutputGradients gradients = {.hidden = at::zeros({kManyRows, kHidden})};
  std::vector<size_t> seen;
  EXPECT_TRUE(loss->ForwardBackward(
                      at::randn({kManyRows, kHidden}).to(type), rows,
                      [&](int64_t, absl::Span<const double> logprobs, auto...) {
                        seen.push_back(logprobs.size());
                        return absl::OkStatus();
                      },
                      gradients)
                  .ok());
  return seen;
}

TEST(FusedOutputLossTest, AutoRecomputesWhereTheKernelsOfTheTypePreferIt) {
  const std::vector<size_t> chunks = {65, 65}, whole = {130};
  kernels::CpuKernels table = kernels::GetCpuKernels();
  kernels::UseCpuKernels(&table);
  table.float_product.prefers_recompute = false;
  table.bfloat16_product.prefers_recompute = true;
  EXPECT_EQ(RowsPerCall(at::kBFloat16), whole);
  EXPECT_EQ(RowsPerCall(at::kFloat), chunks);
  // Whole rows of logits never prefer it.
  EXPECT_EQ(RowsPerCall(at::kBFloat16, {}, LossImpl::kRows), chunks);
  EXPECT_EQ(RowsPerCall(at::kBFloat16, {}, LossImpl::kAten), chunks);
  table.float_product.prefers_recompute = true;
  table.bfloat16_product.prefers_recompute = false;
  EXPECT_EQ(RowsPerCall(at::kBFloat16), chunks);
  EXPECT_EQ(RowsPerCall(at::kFloat), whole);
  EXPECT_EQ(RowsPerCall(at::kDouble), chunks);
  // With a group one rank that prefers to recompute is enough.
  EXPECT_EQ(RowsPerCall(at::kBFloat16, ShardOfTwoRanks(false)), chunks);
  EXPECT_EQ(RowsPerCall(at::kBFloat16, ShardOfTwoRanks(true)), whole);
  kernels::UseCpuKernels(nullptr);
}

TEST(FusedOutputLossTest, ReportsTheImplementationAndTheReason) {
  const Problem p;
  const auto make = [&](LossImpl impl, at::ScalarType type) {
    return LinearCrossEntropyLoss::Create(p.weight.to(type), {.impl = impl}).value();
  };
  for (const LossImpl impl : {LossImpl::kTiles, LossImpl::kRows, LossImpl::kAten}) {
    EXPECT_EQ(make(impl, at::kFloat)->impl(), impl);
    EXPECT_EQ(make(impl, at::kFloat)->reason(), "asked for");
    // There are no own kernels for float64.
    const auto other = make(impl, at::kDouble);
    EXPECT_EQ(other->impl(), LossImpl::kAten);
    EXPECT_EQ(other->is_fallback(), impl != LossImpl::kAten);
  }
  EXPECT_EQ(make(LossImpl::kAuto, at::kBFloat16)->impl(), LossImpl::kTiles);
  EXPECT_EQ(make(LossImpl::kAuto, at::kDouble)->impl(), LossImpl::kAten);
  EXPECT_FALSE(make(LossImpl::kAuto, at::kDouble)->is_fallback());
}

TEST(FusedOutputLossTest, ConfiguredNamesStandForImplementations) {
  EXPECT_EQ(ParseLossImpl("auto").value(), LossImpl::kAuto);
  EXPECT_EQ(ParseLossImpl("cce").value(), LossImpl::kTiles);
  EXPECT_EQ(ParseLossImpl("torch_compile").value(), LossImpl::kRows);
  EXPECT_EQ(ParseLossImpl("pytorch").value(), LossImpl::kAten);
  EXPECT_FALSE(ParseLossImpl("tiles").ok());  // a name of the code, not of the configuration
}

TEST(FusedOutputLossTest, BadInputIsRefused) {
  Problem p;
  auto loss = LinearCrossEntropyLoss::Create(p.weight).value();
  OutputRows rows = p.rows;
  rows.labels[3] = kVocabulary;
  EXPECT_EQ(FieldPath(loss->LogProbs(p.hidden, rows).status()), "labels[3]");
  rows = p.rows;
  rows.positions[2] = -1;
  EXPECT_EQ(FieldPath(loss->LogProbs(p.hidden, rows).status()), "positions[2]");
  rows = p.rows;
  rows.labels.pop_back();
  EXPECT_EQ(FieldPath(loss->LogProbs(p.hidden, rows).status()), "labels");
  EXPECT_EQ(FieldPath(loss->LogProbs(p.hidden.narrow(1, 0, 3), p.rows).status()), "hidden");
  EXPECT_EQ(FieldPath(LinearCrossEntropyLoss::Create(p.weight, {.logits_chunk_bytes = 8}).status()),
            "logits_chunk_bytes");
  for (const double soft_cap : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(FieldPath(LinearCrossEntropyLoss::Create(p.weight, {.soft_cap = soft_cap}).status()),
              "soft_cap");
  }
  EXPECT_EQ(LinearCrossEntropyLoss::Create(p.weight.to(at::kHalf)).status().code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace tandem::loss
