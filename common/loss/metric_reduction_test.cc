// Several evaluators of some rows each report the same together as one evaluator of all rows.
#include "common/loss/metric_reduction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/loss/policy_loss.h"
#include "common/loss/supervised_loss.h"
#include "common/loss/testing/reduce_by_hand.h"
#include "common/loss/value_loss.h"

namespace tandem::loss {
namespace {

// Rows of five sequences, one of which has none.
const std::vector<int64_t> kSequenceRows = {3, 1, 0, 4, 2};
constexpr size_t kRows = 10;

// Irregular numbers in [-1, 1].
double Number(size_t i, double salt) {
  return std::sin(12.9898 * static_cast<double>(i + 1) + 78.233 * salt);
}

std::vector<double> Numbers(double salt, double scale = 1, double offset = 0) {
  std::vector<double> numbers;
  for (size_t i = 0; i < kRows; ++i) numbers.push_back(offset + scale * Number(i, salt));
  return numbers;
}

// Evaluates the rows [first, first + count).
template <typename Evaluator>
using EvaluateRows = std::function<absl::Status(Evaluator&, size_t first, size_t count)>;

// Gives sequence i to evaluators[i mod count].
template <typename Evaluator>
void Distribute(const EvaluateRows<Evaluator>& evaluate, size_t count,
                std::vector<Evaluator>& evaluators) {
  size_t first = 0;
  for (size_t i = 0; i < kSequenceRows.size(); ++i) {
    const auto rows = static_cast<size_t>(kSequenceRows[i]);
    ASSERT_TRUE(evaluate(evaluators[i % count], first, rows).ok());
    first += rows;
  }
}

// Expects the same `metrics` for different numbers of evaluators, of which the last may be idle.
template <typename Evaluator, typename MetricsOf>
void ExpectEvaluatorsReportTheWhole(const Evaluator& fresh, const EvaluateRows<Evaluator>& evaluate,
                                    const MetricsOf& metrics) {
  std::vector<Evaluator> whole = {fresh};
  Distribute(evaluate, 1, whole);
  for (const size_t count : {1, 2, 3}) {
    for (const size_t idle : {0, 1}) {
      SCOPED_TRACE(testing::Message() << count << " evaluators, " << idle << " more without rows");
      std::vector<Evaluator> evaluators(count + idle, fresh);
      Distribute(evaluate, count, evaluators);
      // Reports in between are reductions of copies, and change nothing.
      std::vector<Evaluator> copies = evaluators;
      ReduceByHand(copies);
      Distribute(evaluate, count, evaluators);
      ReduceByHand(evaluators);
      for (const Evaluator& copy : copies) ExpectSameMetrics(metrics(copy), metrics(whole[0]));
      std::vector<Evaluator> twice = whole;
      Distribute(evaluate, 1, twice);
      for (const Evaluator& each : evaluators) ExpectSameMetrics(metrics(each), metrics(twice[0]));
    }
  }
}

void ExpectPolicyEvaluatorsReportTheWhole(const PolicyLossOptions& options) {
  PolicyTokens tokens = {.old_logprobs = Numbers(1, 0.5, -1),
                         .advantages = Numbers(2),
                         .scales = Numbers(3, 0.1, 0.5),
                         .reference = Numbers(4, 0.5, -1),
                         .behaviour = Numbers(5, 0.5, -1),
                         .authorship = {1, 0, 1, 1, 0, 0, 1, 1, 1, 0},
                         .sequence_rows = kSequenceRows};
  const std::vector<double> logprobs = Numbers(6, 0.5, -1), entropies = Numbers(7, 0.5, 1);
  const EvaluateRows<PolicyLossEvaluator> evaluate = [&](PolicyLossEvaluator& evaluator,
                                                         size_t first, size_t count) {
    std::vector<double> c(count), e(count);
    return evaluator.Evaluate(
        static_cast<int64_t>(first), absl::MakeConstSpan(logprobs).subspan(first, count),
        absl::MakeConstSpan(entropies).subspan(first, count), absl::MakeSpan(c), absl::MakeSpan(e));
  };
  ExpectEvaluatorsReportTheWhole(PolicyLossEvaluator::Create(options, tokens).value(), evaluate,
                                 [](const PolicyLossEvaluator& x) { return x.Metrics(); });
}

TEST(MetricReductionTest, PolicyLoss) {
  ExpectPolicyEvaluatorsReportTheWhole({.kl_estimator = KlEstimator::kK3,
                                        .kl_coefficient = 0.1,
                                        .entropy_coefficient = 0.01,
                                        .importance_sampling_cap = 1.2,
                                        .importance_sampling_mode = ImportanceSamplingMode::kMask});
}

TEST(MetricReductionTest, PolicyLossOfSequences) {
  ExpectPolicyEvaluatorsReportTheWhole(
      {.kind = PolicyLossKind::kGspo,
       .importance_sampling_cap = 1.5,
       .importance_sampling_floor = 0.9,
       .importance_sampling_level = ImportanceSamplingLevel::kSequence,
       .importance_sampling_mode = ImportanceSamplingMode::kMask});
}

TEST(MetricReductionTest, PolicyLossOfMaskedSequences) {
  ExpectPolicyEvaluatorsReportTheWhole({.off_policy_mask_threshold = 0.1});
}

TEST(MetricReductionTest, SupervisedLoss) {
  const std::vector<double> scales = Numbers(1, 0.1, 0.5);
  const std::vector<double> logprobs = Numbers(2, 0.5, -1), entropies = Numbers(3, 0.5, 1);
  const EvaluateRows<SupervisedLossEvaluator> evaluate = [&](SupervisedLossEvaluator& evaluator,
                                                             size_t first, size_t count) {
    std::vector<double> c(count), e(count);
    return evaluator.Evaluate(
        static_cast<int64_t>(first), absl::MakeConstSpan(logprobs).subspan(first, count),
        absl::MakeConstSpan(entropies).subspan(first, count), absl::MakeSpan(c), absl::MakeSpan(e));
  };
  struct Metrics {
    double loss, mean_entropy;
    int64_t tokens;
  };
  ExpectEvaluatorsReportTheWhole(
      SupervisedLossEvaluator(scales), evaluate, [](const SupervisedLossEvaluator& x) {
        return Metrics{.loss = x.loss(), .mean_entropy = x.mean_entropy(), .tokens = x.tokens()};
      });
}

TEST(MetricReductionTest, ValueLoss) {
  const ValueTokens tokens = {
      .returns = Numbers(1), .old_values = Numbers(2), .scales = Numbers(3, 0.1, 0.5)};
  const std::vector<double> values = Numbers(4);
  const EvaluateRows<ValueLossEvaluator> evaluate = [&](ValueLossEvaluator& evaluator, size_t first,
                                                        size_t count) {
    std::vector<double> gradients(count);
    return evaluator.Evaluate(static_cast<int64_t>(first),
                              absl::MakeConstSpan(values).subspan(first, count),
                              absl::MakeSpan(gradients));
  };
  ExpectEvaluatorsReportTheWhole(ValueLossEvaluator::Create({.clip = 0.2}, tokens).value(),
                                 evaluate, [](const ValueLossEvaluator& x) { return x.Metrics(); });
}

TEST(MetricReductionTest, AFailureChangesNothing) {
  double sum = 1, maximum = 2;
  int64_t count = 3;
  const auto fail = [](absl::Span<double> sums, absl::Span<double> maxima) {
    sums[0] = sums[1] = maxima[0] = 7;
    return absl::UnavailableError("a rank is gone");
  };
  EXPECT_EQ(ReduceMetrics(fail, {&sum, &count}, {&maximum}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sum, 1);
  EXPECT_EQ(maximum, 2);
  EXPECT_EQ(count, 3);
}

}  // namespace
}  // namespace tandem::loss
