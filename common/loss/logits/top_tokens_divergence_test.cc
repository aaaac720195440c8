// The divergence from a teacher's likeliest tokens against an oracle: whole logits in float64, the
// probabilities of the buckets, and autograd.
#include "common/loss/logits/top_tokens_divergence.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/logits/linear_divergence.h"
#include "common/loss/testing/float64.h"
#include "common/loss/testing/metered_memory.h"
#include "common/ops/testing/aten_kernels.h"

namespace tandem::loss {
namespace {

constexpr int64_t kTokens = 17, kHidden = 7, kVocabulary = 19, kRows = 11;
constexpr Divergence kReverse = {.kind = DivergenceKind::kReverse};
constexpr Divergence kDivergences[] = {kReverse,
                                       {.kind = DivergenceKind::kForward},
                                       {.kind = DivergenceKind::kJensenShannon, .beta = 0.5},
                                       {.kind = DivergenceKind::kJensenShannon, .beta = 0.9}};

// Some rows, out of order, and the k likeliest tokens of a teacher of random logits.
struct Problem {
  explicit Problem(int64_t k = 4, int64_t vocabulary = kVocabulary) : k(k) {
    at::manual_seed(7);
    hidden = at::randn({kTokens, kHidden}, at::kDouble);
    weight = at::randn({vocabulary, kHidden}, at::kDouble);
    teacher = at::log_softmax(2 * at::randn({kRows, vocabulary}, at::kDouble), 1);
    SetTop();
    for (int64_t i = 0; i < kRows; ++i) {
      positions.push_back(5 * i % kTokens);
      temperatures.push_back(0.5 + 0.1 * static_cast<double>(i));
      scales.push_back(0.3 - 0.05 * static_cast<double>(i));
    }
  }

  void SetTop() {
    const auto [values, indices] = teacher.topk(k, 1);
    const at::Tensor floats = values.to(at::kFloat).contiguous(),
                     ints = indices.to(at::kInt).contiguous();
    ids.assign(ints.data_ptr<int32_t>(), ints.data_ptr<int32_t>() + ints.numel());
    logprobs.assign(floats.data_ptr<float>(), floats.data_ptr<float>() + floats.numel());
  }

  Problem To(at::ScalarType type, at::Device device = at::kCPU) const {
    Problem p = *this;
    for (at::Tensor* x : {&p.hidden, &p.weight}) *x = x->to(device, type);
    return p;
  }

  TopTokenRows rows() const {
    return {.positions = positions,
            .count = k,
            .ids = ids,
            .logprobs = logprobs,
            .temperatures = temperatures};
  }

  int64_t k;
  at::Tensor hidden, weight;
  at::Tensor teacher;  // [N, V], log-probabilities
  std::vector<int64_t> positions;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<double> temperatures, scales;
  std::optional<double> soft_cap;
};

struct Result {
  std::vector<double> divergences, rest;
  at::Tensor hidden, weight;
};

std::vector<double> Numbers(const at::Tensor& x) {
  const at::Tensor numbers = x.detach().contiguous();
  return {numbers.data_ptr<double>(), numbers.data_ptr<double>() + numbers.numel()};
}

Result Oracle(const Problem& p, const Divergence& divergence) {
  const at::Tensor hidden = p.hidden.clone().requires_grad_();
  const at::Tensor weight = p.weight.clone().requires_grad_();
  at::Tensor z = hidden.index_select(0, at::tensor(p.positions)).matmul(weight.t());
  if (p.soft_cap.has_value()) z = *p.soft_cap * at::tanh(z / *p.soft_cap);
  if (!p.temperatures.empty()) z = z / Vector(p.temperatures).unsqueeze(1);
  const at::Tensor ids =
      at::tensor(std::vector<int64_t>(p.ids.begin(), p.ids.end())).view({kRows, p.k});
  const at::Tensor logq =
      Vector(std::vector<double>(p.logprobs.begin(), p.logprobs.end())).view({kRows, p.k});
  // The tokens of the rest are summed one by one.
  at::Tensor is_rest = at::ones({kRows, p.weight.size(0)}, at::kDouble).scatter(1, ids, 0);
  const at::Tensor probabilities = at::softmax(z, 1);
  const at::Tensor rest = (probabilities * is_rest).sum(1, true);
  const at::Tensor student = at::cat({probabilities.gather(1, ids), rest}, 1);
  at::Tensor teacher = at::cat({logq.exp(), (1 - logq.exp().sum(1, true)).clamp_min(kMinRest)}, 1);
  teacher = teacher / teacher.sum(1, true);
  const auto kl = [](const at::Tensor& from, const at::Tensor& to) {
    return (from * (from.log() - to.log())).sum(1);
  };
  at::Tensor found;
  switch (divergence.kind) {
    case DivergenceKind::kReverse:
      found = kl(student, teacher);
      break;
    case DivergenceKind::kForward:
      found = kl(teacher, student);
      break;
    case DivergenceKind::kJensenShannon: {
      const at::Tensor mixture = divergence.beta * teacher + (1 - divergence.beta) * student;
      found = divergence.beta * kl(teacher, mixture) + (1 - divergence.beta) * kl(student, mixture);
      break;
    }
  }
  (Vector(p.scales) * found).sum().backward();
  return {Numbers(found), Numbers(rest), hidden.grad(), weight.grad()};
}

std::unique_ptr<TopTokensDivergenceLoss> Make(const Problem& p,
                                              TopTokensDivergenceOptions options = {}) {
  options.soft_cap = p.soft_cap;
  return TopTokensDivergenceLoss::Create(p.weight, options).value();
}

Result Compute(const Problem& p, const Divergence& divergence, TopTokensDivergenceLoss& loss,
               at::ScalarType gradient_type) {
  OutputGradients gradients = {.hidden = at::zeros_like(p.hidden, gradient_type),
                               .weight = at::zeros_like(p.weight, gradient_type)};
  const auto found = loss.ForwardBackward(p.hidden, p.rows(), divergence, p.scales, gradients);
  EXPECT_TRUE(found.ok()) << found.status();
  return {found->divergences, found->rest, gradients.hidden.cpu(), gradients.weight.cpu()};
}

Result Compute(const Problem& p, const Divergence& divergence,
               at::ScalarType gradient_type = at::kDouble) {
  return Compute(p, divergence, *Make(p), gradient_type);
}

void ExpectClose(const Result& actual, const Result& expected, double tolerance) {
  EXPECT_LT(MaxDifference(Vector(actual.divergences), Vector(expected.divergences)), tolerance);
  EXPECT_LT(MaxDifference(Vector(actual.rest), Vector(expected.rest)), tolerance);
  EXPECT_LT(MaxDifference(actual.hidden, expected.hidden), tolerance);
  EXPECT_LT(MaxDifference(actual.weight, expected.weight), tolerance);
}

TEST(TopTokensDivergenceTest, EqualsTheOracle) {
  for (const int64_t k : {1, 4, 18}) {
    Problem p(k);
    for (const bool temperatures : {true, false}) {
      if (!temperatures) p.temperatures.clear();
      for (const Divergence& divergence : kDivergences) {
        ExpectClose(Compute(p, divergence), Oracle(p, divergence), 1e-12);
      }
    }
  }
}

TEST(TopTokensDivergenceTest, SoftCapsEqualTheOracle) {
  Problem p;
  const double uncapped = Oracle(p, kReverse).divergences[0];
  p.soft_cap = 2.0;
  EXPECT_GT(std::abs(Oracle(p, kReverse).divergences[0] - uncapped), 1e-2);
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Oracle(p, divergence);
    ExpectClose(Compute(p, divergence), expected, 1e-12);
    ExpectClose(Compute(p.To(at::kFloat), divergence, at::kFloat), expected, 2e-5);
    const ops::AtenKernels aten;
    ExpectClose(Compute(p.To(at::kFloat), divergence, at::kFloat), expected, 2e-5);
  }
}

// A vocabulary of several blocks of columns and a rest.
TEST(TopTokensDivergenceTest, Float32EqualsTheOracleOnOwnKernelsAndOnAten) {
  const Problem p(32, 5003);
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Oracle(p, divergence);
    ExpectClose(Compute(p.To(at::kFloat), divergence, at::kFloat), expected, 2e-5);
    const ops::AtenKernels aten;
    ExpectClose(Compute(p.To(at::kFloat), divergence, at::kFloat), expected, 2e-5);
  }
}

TEST(TopTokensDivergenceTest, EqualsTheOracleOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
  const Problem p(32, 5003);
  for (const Divergence& divergence : kDivergences) {
    ExpectClose(Compute(p.To(at::kFloat, at::kCUDA), divergence, at::kFloat), Oracle(p, divergence),
                2e-5);
  }
}

// Compares with the same numbers in float64. The tolerance covers rounding the gradients of the
// logits and of the hidden states to bf16.
TEST(TopTokensDivergenceTest, HiddenStatesAndWeightsMayBeBfloat16) {
  const Problem half = Problem().To(at::kBFloat16);
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Oracle(half.To(at::kDouble), divergence);
    const auto expect_close = [&] {
      const Result found = Compute(half, divergence, at::kFloat);
      EXPECT_LT(MaxDifference(Vector(found.divergences), Vector(expected.divergences)), 2e-5);
      for (const auto& [actual, wanted] :
           {std::pair(found.hidden, expected.hidden), {found.weight, expected.weight}}) {
        EXPECT_LT(MaxDifference(actual, wanted), 1e-2 * wanted.abs().max().item<double>());
      }
    };
    expect_close();
    const ops::AtenKernels aten;
    expect_close();
  }
}

TEST(TopTokensDivergenceTest, GradientEqualsDifferences) {
  const Problem problem;
  const double h = 1e-6;
  for (const Divergence& divergence : kDivergences) {
    const Result result = Compute(problem, divergence);
    for (at::Tensor Problem::*const matrix : {&Problem::hidden, &Problem::weight}) {
      const at::Tensor gradient = matrix == &Problem::hidden ? result.hidden : result.weight;
      for (int64_t i = 0; i < kHidden; ++i) {
        const auto moved = [&](double by) {
          Problem p = problem;
          p.*matrix = (problem.*matrix).clone();
          (p.*matrix)[10][i] += by;
          const Result found = Compute(p, divergence);
          double sum = 0;
          for (size_t r = 0; r < kRows; ++r) sum += p.scales[r] * found.divergences[r];
          return sum;
        };
        EXPECT_NEAR(gradient[10][i].item<double>(), (moved(h) - moved(-h)) / (2 * h), 1e-8);
      }
    }
  }
}

// Joining tokens to a bucket loses information; with one token in the rest nothing is lost.
TEST(TopTokensDivergenceTest, IsAtMostTheDivergenceOverTheWholeVocabulary) {
  for (const Divergence& divergence : kDivergences) {
    std::vector<double> before(kRows, 0.0);
    for (const int64_t k : {1, 4, 12, 18}) {
      Problem p(k);
      p.temperatures.clear();
      const Result found = Compute(p, divergence);
      // A teacher whose logits are its log-probabilities, with one hidden state per row.
      auto whole = LinearDivergenceLoss::Create(p.weight, p.teacher.t().contiguous()).value();
      at::Tensor teacher_hidden = at::zeros({kTokens, kRows}, at::kDouble);
      for (int64_t r = 0; r < kRows; ++r) teacher_hidden[p.positions[r]][r] = 1;
      OutputGradients none;
      const std::vector<double> bound =
          whole
              ->ForwardBackward(p.hidden, teacher_hidden, {.positions = p.positions}, divergence,
                                p.scales, none)
              .value();
      for (size_t r = 0; r < kRows; ++r) {
        // The teacher's numbers were rounded to float32.
        EXPECT_LE(found.divergences[r], bound[r] + 1e-5);
        EXPECT_GE(found.divergences[r], 0);
        if (k == kVocabulary - 1) {
          EXPECT_NEAR(found.divergences[r], bound[r], 1e-5);
        }
        EXPECT_GE(found.divergences[r], before[r] - 1e-5);
        before[r] = found.divergences[r];
      }
    }
  }
}

TEST(TopTokensDivergenceTest, TheTeacherItselfHasNoDivergenceAndNoGradient) {
  Problem p;
  at::Tensor z = p.hidden.index_select(0, at::tensor(p.positions)).matmul(p.weight.t());
  p.teacher = at::log_softmax(z / Vector(p.temperatures).unsqueeze(1), 1);
  p.SetTop();
  for (const Divergence& divergence : kDivergences) {
    const Result found = Compute(p, divergence);
    for (const double number : found.divergences) EXPECT_NEAR(number, 0, 1e-12);
    EXPECT_LT(found.weight.abs().max().item<double>(), 1e-6);
  }
}

// A teacher that is sure leaves nothing to the rest: float32 log-probabilities may sum to above 1.
TEST(TopTokensDivergenceTest, ASureTeacherHasAFiniteDivergence) {
  Problem p(2);
  for (size_t i = 0; i < p.logprobs.size(); ++i) p.logprobs[i] = i % 2 == 0 ? 1e-7f : -100.0f;
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Oracle(p, divergence);
    ExpectClose(Compute(p, divergence), expected, 1e-12);
    EXPECT_LT(*std::ranges::max_element(expected.divergences), 110);
  }
}

TEST(TopTokensDivergenceTest, LargeLogitsStayFinite) {
  Problem p;
  p.weight = p.weight * 1e4;
  for (const Divergence& divergence : kDivergences) {
    const Result result = Compute(p.To(at::kFloat), divergence, at::kFloat);
    for (const double found : result.divergences) EXPECT_TRUE(std::isfinite(found));
    EXPECT_TRUE(result.weight.isfinite().all().item<bool>());
  }
}

TEST(TopTokensDivergenceTest, ChunksDoNotChangeTheResult) {
  const Problem p;
  for (const Divergence& divergence : kDivergences) {
    const Result whole = Compute(p, divergence);
    for (const int64_t rows : {3, 8}) {
      const auto loss = Make(p, {.logits_chunk_bytes = rows * kVocabulary * 8});
      EXPECT_LT(loss->chunk_rows(), kRows);
      ExpectClose(Compute(p, divergence, *loss, at::kDouble), whole, 1e-13);
    }
  }
}

// The loss of a step and the divergence behind it take one buffer.
TEST(TopTokensDivergenceTest, LogitsMayHaveTheMemoryOfAnotherLoss) {
  const Problem p;
  const auto shared = std::make_shared<LogitsBuffer>();
  const auto policy =
      LinearCrossEntropyLoss::Create(p.weight, {.impl = LossImpl::kAten, .buffer = shared}).value();
  const auto loss = Make(p, {.buffer = shared});
  const OutputRows rows = {.positions = p.positions,
                           .labels = std::vector<int64_t>(p.positions.size(), 3)};
  const at::TensorOptions doubles = at::TensorOptions().dtype(at::kDouble);
  const std::vector<double> before = policy->LogProbs(p.hidden, rows).value().logprobs;
  for (const Divergence& divergence : kDivergences) {
    ExpectClose(Compute(p, divergence, *loss, at::kDouble), Compute(p, divergence), 1e-15);
    const at::Tensor memory = shared->AtLeast(0, doubles);
    EXPECT_EQ(policy->LogProbs(p.hidden, rows).value().logprobs, before);
    EXPECT_TRUE(shared->AtLeast(0, doubles).is_same(memory));
    EXPECT_EQ(memory.numel(), kRows * kVocabulary);
  }
}

TEST(TopTokensDivergenceTest, UndefinedGradientsAreNotComputedAndOthersAreAddedTo) {
  const Problem p;
  const Result both = Compute(p, kReverse);
  OutputGradients none;
  EXPECT_EQ(Make(p)->ForwardBackward(p.hidden, p.rows(), kReverse, p.scales, none)->divergences,
            both.divergences);
  EXPECT_FALSE(none.hidden.defined() || none.weight.defined());
  OutputGradients of_hidden = {.hidden = at::ones_like(p.hidden)};
  ASSERT_TRUE(Make(p)->ForwardBackward(p.hidden, p.rows(), kReverse, p.scales, of_hidden).ok());
  EXPECT_LT(MaxDifference(of_hidden.hidden, both.hidden + 1), 1e-14);
}

TEST(TopTokensDivergenceTest, TheErrorNamesARowThatIsNotFinite) {
  for (const Divergence& divergence : kDivergences) {
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Problem p;
      p.hidden[p.positions[4]][2] = bad;
      OutputGradients none;
      const absl::Status status =
          Make(p)->ForwardBackward(p.hidden, p.rows(), divergence, p.scales, none).status();
      EXPECT_TRUE(IsNotFinite(status)) << status;
      EXPECT_NE(std::string(status.message()).find("row 4 "), std::string::npos) << status;
    }
  }
}

TEST(TopTokensDivergenceTest, BadInputIsRefused) {
  const Problem p;
  const auto create = [](const at::Tensor& weight, const TopTokensDivergenceOptions& options = {}) {
    return FieldPath(TopTokensDivergenceLoss::Create(weight, options).status());
  };
  EXPECT_EQ(create({}), "weight");
  EXPECT_EQ(create(p.weight, {.logits_chunk_bytes = 3 * kVocabulary * 8 - 1}),
            "logits_chunk_bytes");
  EXPECT_EQ(create(p.weight, {.soft_cap = 0.0}), "soft_cap");
  const auto loss = Make(p);
  const auto refused = [&](const TopTokenRows& rows, std::vector<double> scales) {
    OutputGradients gradients;
    const absl::Status status =
        loss->ForwardBackward(p.hidden, rows, kReverse, scales, gradients).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  TopTokenRows rows = p.rows();
  rows.positions[3] = kTokens;
  EXPECT_EQ(refused(rows, p.scales), "positions[3]");
  rows = p.rows();
  rows.temperatures[3] = 0;
  EXPECT_EQ(refused(rows, p.scales), "temperatures");
  for (const int64_t count : {int64_t{0}, kVocabulary}) {
    rows = p.rows();
    rows.count = count;
    EXPECT_EQ(refused(rows, p.scales), "count");
  }
  rows = p.rows();
  rows.ids.remove_suffix(1);
  EXPECT_EQ(refused(rows, p.scales), "ids");
  rows = p.rows();
  rows.logprobs.remove_suffix(1);
  EXPECT_EQ(refused(rows, p.scales), "logprobs");
  std::vector<int32_t> ids = p.ids;
  for (const int32_t bad : {-1, static_cast<int32_t>(kVocabulary)}) {
    ids[5] = bad;
    rows = p.rows();
    rows.ids = ids;
    EXPECT_EQ(refused(rows, p.scales), "ids[5]");
  }
  EXPECT_EQ(refused(p.rows(), {1.0}), "scales");
}

// No allocation of logits may grow beyond the budget.
TEST(TopTokensDivergenceTest, PeakStaysWithinTheBudget) {
  constexpr int64_t kMany = 64, kWidth = 16, kWords = 10000, kBudget = 1 << 19, kTop = 2;
  const MeteredMemory meter;
  at::manual_seed(1);
  const at::Tensor hidden = at::randn({kMany, kWidth}), weight = at::randn({kWords, kWidth});
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < kMany; ++row) positions.push_back(row);
  const std::vector<int32_t> ids(kMany * kTop, 3);
  const std::vector<float> logprobs(kMany * kTop, -2.0f);
  const std::vector<double> scales(kMany, 1.0);
  OutputGradients gradients = {.hidden = at::zeros_like(hidden), .weight = at::zeros_like(weight)};
  const auto measure = [&] {
    auto loss = TopTokensDivergenceLoss::Create(weight, {.logits_chunk_bytes = kBudget}).value();
    const int64_t start = meter->live();
    meter->Restart();
    ASSERT_TRUE(loss->ForwardBackward(
                        hidden,
                        {.positions = positions, .count = kTop, .ids = ids, .logprobs = logprobs},
                        kReverse, scales, gradients)
                    .ok());
    // Beside the logits there are only some numbers per row and token of the teacher.
    constexpr int64_t kSmall = kMany * (2 * kWidth * 4 + 16 * (kTop + 1) * 8);
    EXPECT_LE(meter->peak() - start, kBudget + kSmall);
    EXPECT_GT(meter->peak() - start, kBudget / 3);
    EXPECT_LT(kBudget + kSmall, kMany * kWords * 4 / 4);
  };
  measure();
  const ops::AtenKernels aten;
  measure();
}

TEST(TopTokensDivergenceTest, PackedRowsHaveTheDivergencesOfTheirValues) {
  if (!ops::PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  Problem p = Problem().To(at::kFloat);
  const auto packed = std::make_shared<const ops::PackedWeight>(kernels::WeightFormat::kBfloat16,
                                                                kVocabulary, kHidden);
  packed->SetRows(0, p.weight);
  p.weight = packed->Rows(at::arange(kVocabulary, at::kLong));
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Compute(p.To(at::kDouble), divergence);
    const auto loss = TopTokensDivergenceLoss::Create(ops::MatrixRows(packed)).value();
    OutputGradients gradients = {.hidden = at::zeros_like(p.hidden)};
    const auto found =
        loss->ForwardBackward(p.hidden, p.rows(), divergence, p.scales, gradients).value();
    for (size_t i = 0; i < kRows; ++i) {
      EXPECT_NEAR(found.divergences[i], expected.divergences[i], 2e-5);
    }
    EXPECT_LT((gradients.hidden - expected.hidden).abs().max().item<double>(), 2e-5);
  }
}

}  // namespace
}  // namespace tandem::loss
