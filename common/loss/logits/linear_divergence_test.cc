// The divergence against an oracle: whole logits in float64, at::kl_div and autograd.
#include "common/loss/logits/linear_divergence.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/loss/testing/float64.h"
#include "common/loss/testing/metered_memory.h"
#include "common/ops/testing/aten_kernels.h"

namespace tandem::loss {
namespace {

constexpr int64_t kTokens = 17, kHidden = 7, kTeacherHidden = 5, kVocabulary = 19;
constexpr Divergence kReverse = {.kind = DivergenceKind::kReverse};
constexpr Divergence kForward = {.kind = DivergenceKind::kForward};
constexpr Divergence kDivergences[] = {kReverse,
                                       kForward,
                                       {.kind = DivergenceKind::kJensenShannon, .beta = 0.5},
                                       {.kind = DivergenceKind::kJensenShannon, .beta = 0.1}};

// Some rows of both models, out of order.
struct Problem {
  explicit Problem(int64_t vocabulary = kVocabulary) {
    at::manual_seed(7);
    hidden = at::randn({kTokens, kHidden}, at::kDouble);
    teacher_hidden = at::randn({kTokens, kTeacherHidden}, at::kDouble);
    weight = at::randn({vocabulary, kHidden}, at::kDouble);
    teacher_weight = at::randn({vocabulary, kTeacherHidden}, at::kDouble);
    for (int64_t i = 0; i < 11; ++i) {
      rows.positions.push_back(5 * i % kTokens);
      rows.temperatures.push_back(0.5 + 0.1 * static_cast<double>(i));
      scales.push_back(0.3 - 0.05 * static_cast<double>(i));
    }
  }

  Problem To(at::ScalarType type, at::Device device = at::kCPU) const {
    Problem p = *this;
    for (at::Tensor* x : {&p.hidden, &p.teacher_hidden, &p.weight, &p.teacher_weight}) {
      *x = x->to(device, type);
    }
    return p;
  }

  at::Tensor hidden, teacher_hidden, weight, teacher_weight;
  std::optional<double> soft_cap, teacher_soft_cap;
  DivergenceRows rows;
  std::vector<double> scales;  // one per row
};

// A problem in which the teacher is the student.
Problem SameModel() {
  Problem p;
  p.teacher_hidden = p.hidden;
  p.teacher_weight = p.weight;
  return p;
}

struct Result {
  std::vector<double> divergences;
  at::Tensor hidden, weight;
};

Result Oracle(const Problem& p, const Divergence& divergence) {
  const at::Tensor hidden = p.hidden.clone().requires_grad_();
  const at::Tensor weight = p.weight.clone().requires_grad_();
  const auto log_softmax = [&](const at::Tensor& h, const at::Tensor& w,
                               std::optional<double> cap) {
    at::Tensor z = h.index_select(0, at::tensor(p.rows.positions)).matmul(w.t());
    if (cap.has_value()) z = *cap * at::tanh(z / *cap);
    if (!p.rows.temperatures.empty()) z = z / Vector(p.rows.temperatures).unsqueeze(1);
    return at::log_softmax(z, 1);
  };
  const at::Tensor logp = log_softmax(hidden, weight, p.soft_cap);
  const at::Tensor logq = log_softmax(p.teacher_hidden, p.teacher_weight, p.teacher_soft_cap);
  const auto kl = [](const at::Tensor& from, const at::Tensor& to) {
    return at::kl_div(to, from, at::Reduction::None, /*log_target=*/true).sum(1);
  };
  at::Tensor divergences;
  if (divergence.kind == DivergenceKind::kJensenShannon) {
    const double beta = divergence.beta;
    const at::Tensor mixture = at::log(beta * logq.exp() + (1 - beta) * logp.exp());
    divergences = beta * kl(logq, mixture) + (1 - beta) * kl(logp, mixture);
  } else {
    divergences = divergence == kReverse ? kl(logp, logq) : kl(logq, logp);
  }
  ((Vector(p.scales) * divergences).sum()).backward();
  const at::Tensor numbers = divergences.detach();
  return {{numbers.data_ptr<double>(), numbers.data_ptr<double>() + numbers.numel()},
          hidden.grad(),
          weight.grad()};
}

std::unique_ptr<LinearDivergenceLoss> Make(const Problem& p, LinearDivergenceOptions options = {}) {
  options.soft_cap = p.soft_cap;
  options.teacher_soft_cap = p.teacher_soft_cap;
  return LinearDivergenceLoss::Create(p.weight, p.teacher_weight, options).value();
}

// Computes divergences and gradients; the gradients are of `gradient_type` and start at 0.
Result Compute(const Problem& p, const Divergence& divergence, LinearDivergenceLoss& loss,
               at::ScalarType gradient_type) {
  OutputGradients gradients = {.hidden = at::zeros_like(p.hidden, gradient_type),
                               .weight = at::zeros_like(p.weight, gradient_type)};
  auto divergences =
      loss.ForwardBackward(p.hidden, p.teacher_hidden, p.rows, divergence, p.scales, gradients);
  EXPECT_TRUE(divergences.ok()) << divergences.status();
  return {*divergences, gradients.hidden.cpu(), gradients.weight.cpu()};
}

Result Compute(const Problem& p, const Divergence& divergence,
               const LinearDivergenceOptions& options = {},
               at::ScalarType gradient_type = at::kDouble) {
  return Compute(p, divergence, *Make(p, options), gradient_type);
}

void ExpectClose(const Result& actual, const Result& expected, double tolerance) {
  EXPECT_LT(MaxDifference(Vector(actual.divergences), Vector(expected.divergences)), tolerance);
  EXPECT_LT(MaxDifference(actual.hidden, expected.hidden), tolerance);
  EXPECT_LT(MaxDifference(actual.weight, expected.weight), tolerance);
}

TEST(LinearDivergenceTest, EqualsTheOracleInBothDirections) {
  Problem p;
  for (const Divergence& divergence : kDivergences) {
    ExpectClose(Compute(p, divergence), Oracle(p, divergence), 1e-12);
  }
  p.rows.temperatures.clear();
  for (const Divergence& divergence : kDivergences) {
    ExpectClose(Compute(p, divergence), Oracle(p, divergence), 1e-12);
  }
}

TEST(LinearDivergenceTest, SoftCapsEqualTheOracle) {
  Problem p;
  const double uncapped = Oracle(p, kReverse).divergences[0];
  using Cap = std::optional<double>;
  for (const auto& [student, teacher] : {std::pair<Cap, Cap>{2.0, {}}, {{}, 3.0}, {2.0, 3.0}}) {
    p.soft_cap = student;
    p.teacher_soft_cap = teacher;
    EXPECT_GT(std::abs(Oracle(p, kReverse).divergences[0] - uncapped), 1e-2);
    for (const Divergence& divergence : kDivergences) {
      const Result expected = Oracle(p, divergence);
      ExpectClose(Compute(p, divergence), expected, 1e-12);
      ExpectClose(Compute(p.To(at::kFloat), divergence, {}, at::kFloat), expected, 2e-5);
      const ops::AtenKernels aten;
      ExpectClose(Compute(p.To(at::kFloat), divergence, {}, at::kFloat), expected, 2e-5);
    }
  }
}

// A vocabulary of several blocks of columns and a rest. The largest gradients are about 5.
TEST(LinearDivergenceTest, Float32EqualsTheOracleOnOwnKernelsAndOnAten) {
  Problem p(5003);
  const Problem narrow = p.To(at::kFloat);
  for (const bool temperatures : {true, false}) {
    if (!temperatures) p.rows.temperatures.clear();
    Problem single = narrow;
    single.rows = p.rows;
    for (const Divergence& divergence : kDivergences) {
      const Result expected = Oracle(p, divergence);
      ExpectClose(Compute(single, divergence, {}, at::kFloat), expected, 2e-5);
      const ops::AtenKernels aten;
      ExpectClose(Compute(single, divergence, {}, at::kFloat), expected, 2e-5);
    }
  }
}

TEST(LinearDivergenceTest, EqualsTheOracleOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
  const Problem p;
  for (const Divergence& divergence : kDivergences) {
    const Problem moved = p.To(at::kFloat, at::kCUDA);
    ExpectClose(Compute(moved, divergence, {}, at::kFloat), Oracle(p, divergence), 2e-5);
  }
}

// Compares with the same numbers in float64. The tolerance covers rounding the gradients of the
// logits and of the hidden states to bf16.
TEST(LinearDivergenceTest, HiddenStatesAndWeightsMayBeBfloat16) {
  const Problem half = Problem().To(at::kBFloat16);
  const Problem p = half.To(at::kDouble);
  for (const Divergence& divergence : kDivergences) {
    const Result expected = Oracle(p, divergence);
    const auto expect_close = [&](const Problem& problem) {
      const auto loss = Make(problem);
      OutputGradients gradients = {.hidden = at::zeros_like(problem.hidden),
                                   .weight = at::zeros({kVocabulary, kHidden})};
      const auto found = loss->ForwardBackward(problem.hidden, problem.teacher_hidden, problem.rows,
                                               divergence, problem.scales, gradients);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_LT(MaxDifference(Vector(*found), Vector(expected.divergences)), 2e-5);
      EXPECT_LT(MaxDifference(gradients.hidden, expected.hidden),
                1e-2 * expected.hidden.abs().max().item<double>());
      EXPECT_LT(MaxDifference(gradients.weight, expected.weight),
                1e-2 * expected.weight.abs().max().item<double>());
    };
    expect_close(half);
    Problem wide = half;
    wide.weight = half.weight.to(at::kFloat);
    wide.teacher_weight = half.teacher_weight.to(at::kFloat);
    expect_close(wide);
    const ops::AtenKernels aten;
    expect_close(half);
  }
}

TEST(LinearDivergenceTest, GradientEqualsDifferences) {
  const Problem problem;
  const double h = 1e-6;
  const auto total = [&](const Problem& p, const Divergence& divergence) {
    const Result result = Compute(p, divergence);
    double sum = 0;
    for (size_t i = 0; i < p.scales.size(); ++i) sum += p.scales[i] * result.divergences[i];
    return sum;
  };
  for (const Divergence& divergence : kDivergences) {
    const Result result = Compute(problem, divergence);
    for (at::Tensor Problem::*const matrix : {&Problem::hidden, &Problem::weight}) {
      const at::Tensor gradient = matrix == &Problem::hidden ? result.hidden : result.weight;
      for (int64_t i = 0; i < kHidden; ++i) {
        const auto moved = [&](double by) {
          Problem p = problem;
          p.*matrix = (problem.*matrix).clone();
          (p.*matrix)[10][i] += by;
          return total(p, divergence);
        };
        EXPECT_NEAR(gradient[10][i].item<double>(), (moved(h) - moved(-h)) / (2 * h), 1e-8);
      }
    }
  }
}

TEST(LinearDivergenceTest, AddsToTheGradients) {
  const Problem p;
  const Result alone = Compute(p, kReverse);
  const at::Tensor hidden = at::randn_like(p.hidden), weight = at::randn_like(p.weight);
  OutputGradients gradients = {.hidden = hidden.clone(), .weight = weight.clone()};
  ASSERT_TRUE(
      Make(p)
          ->ForwardBackward(p.hidden, p.teacher_hidden, p.rows, kReverse, p.scales, gradients)
          .ok());
  EXPECT_LT(MaxDifference(gradients.hidden, hidden + alone.hidden), 1e-13);
  EXPECT_LT(MaxDifference(gradients.weight, weight + alone.weight), 1e-13);
}

TEST(LinearDivergenceTest, UndefinedGradientsAreNotComputed) {
  const Problem p;
  const auto loss = Make(p);
  for (const Divergence& divergence : kDivergences) {
    const Result both = Compute(p, divergence);
    for (const bool of_hidden : {false, true}) {
      for (const bool of_weight : {false, true}) {
        OutputGradients gradients;
        if (of_hidden) gradients.hidden = at::zeros_like(p.hidden);
        if (of_weight) gradients.weight = at::zeros_like(p.weight);
        EXPECT_EQ(loss->ForwardBackward(p.hidden, p.teacher_hidden, p.rows, divergence, p.scales,
                                        gradients)
                      .value(),
                  both.divergences);
        EXPECT_EQ(gradients.hidden.defined(), of_hidden);
        EXPECT_EQ(gradients.weight.defined(), of_weight);
        EXPECT_TRUE(!of_hidden || at::equal(gradients.hidden, both.hidden));
        EXPECT_TRUE(!of_weight || at::equal(gradients.weight, both.weight));
      }
    }
  }
}

TEST(LinearDivergenceTest, TheSameModelHasNoDivergenceAndNoGradient) {
  const Problem p = SameModel();
  const auto expect_none = [](const Result& result, double tolerance) {
    for (const double found : result.divergences) EXPECT_NEAR(found, 0, tolerance);
    EXPECT_LT(result.hidden.abs().max().item<double>(), tolerance);
    EXPECT_LT(result.weight.abs().max().item<double>(), tolerance);
  };
  for (const Divergence& divergence : kDivergences) {
    expect_none(Compute(p, divergence), 1e-12);
    // The same in float32: both models are rounded alike, but not their mixture.
    const bool mixes = divergence.kind == DivergenceKind::kJensenShannon;
    expect_none(Compute(p.To(at::kFloat), divergence, {}, at::kFloat), mixes ? 5e-6 : 1e-12);
  }
}

TEST(LinearDivergenceTest, ChunksDoNotChangeTheResult) {
  const Problem p;
  const Problem narrow = p.To(at::kFloat);
  for (const Divergence& divergence : kDivergences) {
    const Result whole = Compute(p, divergence);
    const Result narrow_whole = Compute(narrow, divergence, {}, at::kFloat);
    for (const int64_t rows : {6, 8, 14}) {
      const auto loss = Make(p, {.logits_chunk_bytes = rows * kVocabulary * 8});
      const auto narrow_loss = Make(narrow, {.logits_chunk_bytes = rows * kVocabulary * 4});
      for (const auto* made : {loss.get(), narrow_loss.get()}) EXPECT_LT(made->chunk_rows(), 11);
      ExpectClose(Compute(p, divergence, *loss, at::kDouble), whole, 1e-13);
      ExpectClose(Compute(narrow, divergence, *narrow_loss, at::kFloat), narrow_whole, 1e-5);
    }
  }
}

TEST(LinearDivergenceTest, BitsDoNotDependOnTheNumberOfThreads) {
  const Problem p = Problem(5003).To(at::kFloat);
  const int threads_before = at::get_num_threads();
  at::set_num_threads(1);
  const Result one = Compute(p, kReverse, {}, at::kFloat);
  for (const int threads : {2, 3}) {
    at::set_num_threads(threads);
    const Result more = Compute(p, kReverse, {}, at::kFloat);
    EXPECT_EQ(more.divergences, one.divergences);
    EXPECT_TRUE(at::equal(more.hidden, one.hidden));
    EXPECT_TRUE(at::equal(more.weight, one.weight));
  }
  at::set_num_threads(threads_before);
}

TEST(LinearDivergenceTest, RowsThatAreNotListedAreNeitherReadNorWritten) {
  Problem p;
  const Result before = Compute(p, kForward);
  std::vector<int64_t> others;
  for (int64_t t = 0; t < kTokens; ++t) {
    if (std::count(p.rows.positions.begin(), p.rows.positions.end(), t) == 0) others.push_back(t);
  }
  ASSERT_EQ(others.size(), 6);
  const at::Tensor index = at::tensor(others);
  EXPECT_EQ(before.hidden.index_select(0, index).abs().max().item<double>(), 0);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  p.hidden.index_fill_(0, index, nan);
  p.teacher_hidden.index_fill_(0, index, nan);
  const Result after = Compute(p, kForward);
  EXPECT_EQ(after.divergences, before.divergences);
  EXPECT_TRUE(at::equal(after.hidden, before.hidden));
  EXPECT_TRUE(at::equal(after.weight, before.weight));
}

TEST(LinearDivergenceTest, WithoutRowsNothingIsComputed) {
  Problem p;
  p.rows = {};
  p.scales.clear();
  const Result result = Compute(p, kReverse);
  EXPECT_TRUE(result.divergences.empty());
  EXPECT_EQ(result.weight.abs().max().item<double>(), 0);
}

TEST(LinearDivergenceTest, LargeLogitsStayFinite) {
  Problem p;
  p.weight = p.weight * 1e4;
  p.teacher_weight = p.teacher_weight * 1e4;
  const Problem narrow = p.To(at::kFloat);
  for (const Divergence& divergence : kDivergences) {
    const Result result = Compute(narrow, divergence, {}, at::kFloat);
    for (const double found : result.divergences) EXPECT_TRUE(std::isfinite(found));
    EXPECT_TRUE(result.weight.isfinite().all().item<bool>());
  }
}

TEST(LinearDivergenceTest, TheErrorNamesARowThatIsNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Divergence& divergence : kDivergences) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), infinity, -infinity}) {
      for (at::Tensor Problem::*const hidden : {&Problem::hidden, &Problem::teacher_hidden}) {
        Problem p;
        (p.*hidden)[p.rows.positions[4]][2] = bad;
        for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
          const Problem typed = p.To(type);
          OutputGradients none;
          const absl::Status status =
              Make(typed)
                  ->ForwardBackward(typed.hidden, typed.teacher_hidden, typed.rows, divergence,
                                    typed.scales, none)
                  .status();
          EXPECT_TRUE(IsNotFinite(status)) << status;
          EXPECT_NE(std::string(status.message()).find("row 4 "), std::string::npos) << status;
        }
      }
    }
  }
}

TEST(LinearDivergenceTest, BadInputIsRefused) {
  const Problem p;
  const auto create = [](const at::Tensor& weight, const at::Tensor& teacher_weight,
                         const LinearDivergenceOptions& options = {}) {
    return LinearDivergenceLoss::Create(weight, teacher_weight, options).status();
  };
  EXPECT_EQ(FieldPath(create({}, p.teacher_weight)), "weight");
  EXPECT_EQ(FieldPath(create(p.weight, p.teacher_weight.t())), "teacher_weight");
  EXPECT_EQ(FieldPath(create(p.weight, p.teacher_weight.narrow(0, 0, 18))), "teacher_weight");
  EXPECT_EQ(FieldPath(create(p.weight, p.teacher_weight.to(at::kFloat))), "teacher_weight");
  EXPECT_EQ(FieldPath(create(p.weight, p.teacher_weight.to(at::kMeta))), "teacher_weight");
  EXPECT_EQ(FieldPath(create(p.weight, p.teacher_weight,
                             {.logits_chunk_bytes = 6 * kVocabulary * 8 - 1})),
            "logits_chunk_bytes");
  const absl::Status half = create(p.weight.to(at::kHalf), p.teacher_weight.to(at::kHalf));
  EXPECT_EQ(half.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldPath(half), "weight");

  const auto loss = Make(p);
  const auto refused = [&](const Problem& bad) {
    OutputGradients gradients;
    const absl::Status status = loss->ForwardBackward(bad.hidden, bad.teacher_hidden, bad.rows,
                                                      kReverse, bad.scales, gradients)
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  };
  Problem bad = p;
  bad.rows.positions[3] = kTokens;
  EXPECT_EQ(refused(bad), "positions[3]");
  bad = p;
  bad.rows.temperatures.pop_back();
  EXPECT_EQ(refused(bad), "temperatures");
  bad = p;
  bad.rows.temperatures[3] = 0;
  EXPECT_EQ(refused(bad), "temperatures");
  bad = p;
  bad.hidden = p.teacher_hidden;
  EXPECT_EQ(refused(bad), "hidden");
  bad = p;
  bad.teacher_hidden = p.hidden;
  EXPECT_EQ(refused(bad), "teacher_hidden");
  bad = p;
  bad.teacher_hidden = p.teacher_hidden.narrow(0, 0, kTokens - 1);
  EXPECT_EQ(refused(bad), "teacher_hidden");
  bad = p;
  bad.teacher_hidden = p.teacher_hidden.to(at::kFloat);
  EXPECT_EQ(refused(bad), "teacher_hidden");
  bad = p;
  bad.scales[2] = std::numeric_limits<double>::infinity();
  EXPECT_EQ(refused(bad), "scales");
  bad = p;
  bad.scales.pop_back();
  EXPECT_EQ(refused(bad), "scales");
}

// No allocation may grow beyond the budget.
TEST(LinearDivergenceTest, PeakStaysWithinTheBudget) {
  constexpr int64_t kRows = 64, kWidth = 16, kWords = 10000, kBudget = 1 << 19;
  const MeteredMemory meter;
  at::manual_seed(1);
  const at::Tensor hidden = at::randn({kRows, kWidth}), weight = at::randn({kWords, kWidth});
  const at::Tensor teacher_weight = at::randn({kWords, kWidth});
  DivergenceRows rows;
  for (int64_t row = 0; row < kRows; ++row) rows.positions.push_back(row);
  rows.temperatures.assign(kRows, 0.7);
  const std::vector<double> scales(kRows, 1.0);
  OutputGradients gradients = {.hidden = at::zeros_like(hidden), .weight = at::zeros_like(weight)};
  const auto measure = [&] {
    auto loss =
        LinearDivergenceLoss::Create(weight, teacher_weight, {.logits_chunk_bytes = kBudget})
            .value();
    const int64_t start = meter->live();
    meter->Restart();
    for (const Divergence& divergence : kDivergences) {
      ASSERT_TRUE(loss->ForwardBackward(hidden, hidden, rows, divergence, scales, gradients).ok());
    }
    // Beside the logits there are only buffers with H numbers, or a few numbers, per row.
    constexpr int64_t kSmall = kRows * (2 * kWidth + 16) * 4;
    EXPECT_LE(meter->peak() - start, kBudget + kSmall);
    EXPECT_GT(meter->peak() - start, kBudget / 2);
    EXPECT_LT(kBudget + kSmall, kRows * kWords * 4 / 4);  // far below the logits of one model
  };
  measure();
  const ops::AtenKernels aten;
  measure();
}

TEST(LinearDivergenceTest, PackedRowsHaveTheDivergencesOfTheirValues) {
  if (!ops::PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  const auto pack = [](const at::Tensor& values) {
    auto packed = std::make_shared<const ops::PackedWeight>(kernels::WeightFormat::kInt8,
                                                            values.size(0), values.size(1));
    packed->SetRows(0, values);
    return packed;
  };
  Problem p = Problem().To(at::kFloat);
  const auto student = pack(p.weight), teacher = pack(p.teacher_weight);
  const at::Tensor all = at::arange(kVocabulary, at::kLong);
  p.weight = student->Rows(all);
  p.teacher_weight = teacher->Rows(all);
  for (const Divergence& divergence : kDivergences) {
    const Result expected =
        Compute(p.To(at::kDouble), divergence, *Make(p.To(at::kDouble)), at::kDouble);
    const auto loss =
        LinearDivergenceLoss::Create(ops::MatrixRows(student), ops::MatrixRows(teacher)).value();
    OutputGradients gradients = {.hidden = at::zeros_like(p.hidden)};
    const auto found =
        loss->ForwardBackward(p.hidden, p.teacher_hidden, p.rows, divergence, p.scales, gradients);
    ASSERT_TRUE(found.ok()) << found.status();
    for (size_t i = 0; i < found->size(); ++i) {
      EXPECT_NEAR((*found)[i], expected.divergences[i], 2e-5);
    }
    EXPECT_LT((gradients.hidden - expected.hidden).abs().max().item<double>(), 2e-5);
    // A model has no divergence from itself, stored in the same way.
    const auto same =
        LinearDivergenceLoss::Create(ops::MatrixRows(student), ops::MatrixRows(student)).value();
    const auto none =
        same->ForwardBackward(p.hidden, p.hidden, p.rows, divergence, p.scales, gradients);
    for (const double value : none.value()) EXPECT_NEAR(value, 0, 1e-6);
  }
}

}  // namespace
}  // namespace tandem::loss
