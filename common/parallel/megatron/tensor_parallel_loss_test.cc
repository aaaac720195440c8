// The losses of a vocabulary-parallel head against those of the whole one in float64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/base/errors/error.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/logits/linear_divergence.h"
#include "common/loss/logits/top_tokens_divergence.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::parallel {
namespace {

using loss::LossImpl;
using loss::LossMode;

// Each of four ranks has more columns than a tile, and its last tile is narrow. Neither two nor
// four ranks divide the vocabulary: the last rank has fewer rows.
constexpr int64_t kRows = 37, kHidden = 6, kVocabulary = 4 * 2100 + 3;

at::Tensor Slice(const at::Tensor& whole, const ops::TensorParallelGroup& group) {
  return whole.chunk(group.size())[group.rank()];
}

loss::VocabularyShard ShardOf(const std::shared_ptr<ranks::CommunicatorGroup>& group) {
  const int64_t rows = (kVocabulary + group->size() - 1) / group->size();
  return {.group = group, .first = group->rank() * rows, .size = kVocabulary, .most_rows = rows};
}

struct Problem {
  Problem() {
    at::manual_seed(5);
    hidden = at::randn({kRows + 3, kHidden}, at::kDouble);
    weight = at::randn({kVocabulary, kHidden}, at::kDouble);
    for (int64_t row = 0; row < kRows; ++row) {
      rows.positions.push_back(row + 2);
      rows.labels.push_back(row * 7919 % kVocabulary);
      rows.temperatures.push_back(0.5 + 0.05 * static_cast<double>(row));
    }
    // Labels at both ends of the rows of two and of four ranks.
    const std::vector<int64_t> ends = {0, 2100, 2101, 4201, 4202, 6302, 6303, kVocabulary - 1};
    std::copy(ends.begin(), ends.end(), rows.labels.begin());
  }
  at::Tensor hidden, weight;
  loss::OutputRows rows;
};

struct Result {
  double loss = 0;
  std::vector<double> logprobs, entropies;
  loss::OutputGradients gradients;
};

// A loss that is nonlinear in log-probabilities and in entropies.
Result Evaluate(loss::LinearCrossEntropyLoss& loss, const at::Tensor& hidden,
                const at::Tensor& weight, const loss::OutputRows& rows, LossMode mode) {
  const at::ScalarType type = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Result result;
  result.gradients = {.hidden = at::zeros(hidden.sizes(), type),
                      .weight = at::zeros(weight.sizes(), type)};
  const absl::Status status = loss.ForwardBackward(
      hidden, rows,
      [&](int64_t first, absl::Span<const double> logprobs, absl::Span<const double> entropies,
          absl::Span<double> c, absl::Span<double> e) {
        for (size_t i = 0; i < logprobs.size(); ++i) {
          const double w = 1.0 + 0.1 * static_cast<double>(first + static_cast<int64_t>(i));
          result.loss += w * (std::sin(logprobs[i]) - 0.2 * entropies[i] * entropies[i]);
          c[i] = w * std::cos(logprobs[i]);
          e[i] = -0.4 * w * entropies[i];
        }
        result.logprobs.insert(result.logprobs.end(), logprobs.begin(), logprobs.end());
        result.entropies.insert(result.entropies.end(), entropies.begin(), entropies.end());
        return absl::OkStatus();
      },
      result.gradients, mode);
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                 const char* what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE((actual.to(at::kDouble) - expected).abs().max().item<double>(),
            tolerance * expected.abs().max().item<double>())
      << what;
}

void ExpectClose(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance, const char* what) {
  ExpectClose(at::tensor(actual, at::kDouble), at::tensor(expected, at::kDouble), tolerance, what);
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

class TensorParallelLossTest : public testing::TestWithParam<int> {
 protected:
  void RunOnAll(const std::function<void(const std::shared_ptr<ranks::CommunicatorGroup>&,
                                         ranks::Communicator&)>& body) const {
    ranks::RunConnected(GetParam(), [&](const std::shared_ptr<ranks::Communicator>& ranks) {
      body(std::make_shared<ranks::CommunicatorGroup>(ranks), *ranks);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelLossTest, testing::Values(1, 2, 4));

TEST_P(TensorParallelLossTest, EqualsTheWholeVocabulary) {
  RunOnAll([&](const std::shared_ptr<ranks::CommunicatorGroup>& group,
               ranks::Communicator& communicator) {
    const Problem problem;
    constexpr double kSoftCap = 4;  // of logits of magnitude 2.4
    const auto whole =
        loss::LinearCrossEntropyLoss::Create(problem.weight, {.soft_cap = kSoftCap}).value();
    const Result expected =
        Evaluate(*whole, problem.hidden, problem.weight, problem.rows, LossMode::kRecompute);
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const double tolerance = type == at::kFloat ? 1e-5 : 1e-13;
      const at::Tensor hidden = problem.hidden.to(type);
      const at::Tensor weight = Slice(problem.weight, *group).to(type);
      for (const LossImpl impl : {LossImpl::kTiles, LossImpl::kRows, LossImpl::kAten}) {
        const auto shard =
            loss::LinearCrossEntropyLoss::Create(weight, {.impl = impl,
                                                          .chunk_size = 16,
                                                          .vocabulary = ShardOf(group),
                                                          .soft_cap = kSoftCap})
                .value();
        for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
          SCOPED_TRACE(testing::Message()
                       << type << " " << LossImplName(impl) << " " << static_cast<int>(mode));
          const Result actual = Evaluate(*shard, hidden, weight, problem.rows, mode);
          EXPECT_NEAR(actual.loss, expected.loss, tolerance * std::abs(expected.loss));
          ExpectClose(actual.logprobs, expected.logprobs, tolerance, "log-probs");
          ExpectClose(actual.entropies, expected.entropies, tolerance, "entropies");
          ExpectClose(group->Sum(actual.gradients.hidden), expected.gradients.hidden, tolerance,
                      "d hidden");
          ExpectClose(actual.gradients.weight, Slice(expected.gradients.weight, *group), tolerance,
                      "d weight");
          const std::string bits = Bytes(actual.logprobs) + Bytes(actual.entropies);
          for (const std::string& other : communicator.AllGatherBytes(bits)) {
            EXPECT_TRUE(other == bits) << "ranks see other bits";
          }
        }
        const loss::RowLogProbs alone = shard->LogProbs(hidden, problem.rows).value();
        ExpectClose(alone.logprobs, expected.logprobs, tolerance, "LogProbs");
        ExpectClose(alone.entropies, expected.entropies, tolerance, "LogProbs");
      }
    }
  });
}

TEST_P(TensorParallelLossTest, OneMaximumAndOneSumOfThreeNumbersARowTravel) {
  RunOnAll([&](const std::shared_ptr<ranks::CommunicatorGroup>& group,
               ranks::Communicator& communicator) {
    const Problem problem;
    const auto shard =
        loss::LinearCrossEntropyLoss::Create(Slice(problem.weight, *group).to(at::kFloat),
                                             {.vocabulary = ShardOf(group)})
            .value();
    ASSERT_TRUE(shard->LogProbs(problem.hidden.to(at::kFloat), problem.rows).ok());
    const ranks::CommunicationVolume volume = communicator.volume();
    const int64_t n = GetParam(), row_bytes = (1 + 3) * 8;
    EXPECT_EQ(volume.all_reduce.calls, n == 1 ? 0 : 2);
    EXPECT_EQ(volume.bytes(), 2 * (n - 1) * kRows * row_bytes / n);
  });
}

TEST_P(TensorParallelLossTest, LabelsAreThoseOfTheWholeVocabulary) {
  RunOnAll([&](const std::shared_ptr<ranks::CommunicatorGroup>& group, ranks::Communicator&) {
    const Problem problem;
    const auto shard = loss::LinearCrossEntropyLoss::Create(Slice(problem.weight, *group),
                                                            {.vocabulary = ShardOf(group)})
                           .value();
    const absl::Status status =
        shard->LogProbs(problem.hidden, {.positions = {0}, .labels = {kVocabulary}}).status();
    EXPECT_EQ(FieldPath(status), "labels[0]") << status;
  });
}

// The expected numbers are those of one process in float64, which linear_divergence_test compares
// with autograd.
TEST_P(TensorParallelLossTest, TheDivergenceEqualsThatOfTheWholeVocabulary) {
  RunOnAll([&](const std::shared_ptr<ranks::CommunicatorGroup>& group,
               ranks::Communicator& communicator) {
    const Problem problem;
    const at::Tensor teacher_hidden = at::randn({kRows + 3, kHidden - 2}, at::kDouble);
    // Logits of two models may differ by an offset, which softmax does not see.
    const at::Tensor teacher_weight = at::randn({kVocabulary, kHidden - 2}, at::kDouble) + 3;
    const loss::DivergenceRows rows = {.positions = problem.rows.positions,
                                       .temperatures = problem.rows.temperatures};
    const std::vector<double> scales(rows.positions.size(), 0.3);
    for (const loss::DivergenceKind kind :
         {loss::DivergenceKind::kReverse, loss::DivergenceKind::kForward,
          loss::DivergenceKind::kJensenShannon}) {
      const loss::Divergence divergence = {.kind = kind, .beta = 0.3};
      const auto whole =
          loss::LinearDivergenceLoss::Create(problem.weight, teacher_weight,
                                             {.soft_cap = 4.0, .teacher_soft_cap = 5.0})
              .value();
      loss::OutputGradients all = {.hidden = at::zeros_like(problem.hidden),
                                   .weight = at::zeros_like(problem.weight)};
      const std::vector<double> expected =
          whole->ForwardBackward(problem.hidden, teacher_hidden, rows, divergence, scales, all)
              .value();
      for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
        SCOPED_TRACE(testing::Message() << type << " " << static_cast<int>(kind));
        const double tolerance = type == at::kFloat ? 1e-5 : 1e-12;
        const at::Tensor weight = Slice(problem.weight, *group).to(type);
        const auto shard =
            loss::LinearDivergenceLoss::Create(
                weight, Slice(teacher_weight, *group).to(type),
                {.vocabulary = ShardOf(group), .soft_cap = 4.0, .teacher_soft_cap = 5.0})
                .value();
        loss::OutputGradients own = {.hidden = at::zeros(problem.hidden.sizes(), type),
                                     .weight = at::zeros(weight.sizes(), type)};
        const std::vector<double> actual =
            shard
                ->ForwardBackward(problem.hidden.to(type), teacher_hidden.to(type), rows,
                                  divergence, scales, own)
                .value();
        ExpectClose(actual, expected, tolerance, "divergences");
        ExpectClose(group->Sum(own.hidden), all.hidden, tolerance, "d hidden");
        ExpectClose(own.weight, Slice(all.weight, *group), tolerance, "d weight");
        for (const std::string& other : communicator.AllGatherBytes(Bytes(actual))) {
          EXPECT_TRUE(other == Bytes(actual)) << "ranks see other bits";
        }
      }
    }
  });
}

// As above. With 64 tokens some are another rank's; with all but two a rank's shard has no other.
TEST_P(TensorParallelLossTest, TheTopTokensDivergenceEqualsThatOfTheWholeVocabulary) {
  RunOnAll([&](const std::shared_ptr<ranks::CommunicatorGroup>& group,
               ranks::Communicator& communicator) {
    const Problem problem;
    const auto rows = static_cast<int64_t>(problem.rows.positions.size());
    const at::Tensor teacher = at::log_softmax(at::randn({rows, kVocabulary}), 1);
    const std::vector<double> scales(problem.rows.positions.size(), 0.3);
    for (const int64_t count : {int64_t{64}, kVocabulary - 2}) {
      std::vector<int32_t> ids;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t stride = count == 64 ? 131 : 1;
        for (int64_t i = 0; i < count; ++i) {
          ids.push_back(static_cast<int32_t>((row + i * stride) % kVocabulary));
        }
      }
      const at::Tensor logprobs = teacher.narrow(1, 0, count).contiguous();
      const loss::TopTokenRows top = {
          .positions = problem.rows.positions,
          .count = count,
          .ids = ids,
          .logprobs = {logprobs.const_data_ptr<float>(), static_cast<size_t>(logprobs.numel())},
          .temperatures = problem.rows.temperatures};
      for (const loss::DivergenceKind kind :
           {loss::DivergenceKind::kReverse, loss::DivergenceKind::kForward,
            loss::DivergenceKind::kJensenShannon}) {
        const loss::Divergence divergence = {.kind = kind, .beta = 0.3};
        const auto whole =
            loss::TopTokensDivergenceLoss::Create(problem.weight, {.soft_cap = 4.0}).value();
        loss::OutputGradients all = {.hidden = at::zeros_like(problem.hidden),
                                     .weight = at::zeros_like(problem.weight)};
        const auto expected =
            whole->ForwardBackward(problem.hidden, top, divergence, scales, all).value();
        for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
          SCOPED_TRACE(testing::Message() << count << " " << type << " " << static_cast<int>(kind));
          const double tolerance = type == at::kFloat ? 1e-5 : 1e-12;
          const at::Tensor weight = Slice(problem.weight, *group).to(type);
          const auto shard = loss::TopTokensDivergenceLoss::Create(
                                 weight, {.vocabulary = ShardOf(group), .soft_cap = 4.0})
                                 .value();
          loss::OutputGradients own = {.hidden = at::zeros(problem.hidden.sizes(), type),
                                       .weight = at::zeros(weight.sizes(), type)};
          const auto actual =
              shard->ForwardBackward(problem.hidden.to(type), top, divergence, scales, own).value();
          ExpectClose(actual.divergences, expected.divergences, tolerance, "divergences");
          ExpectClose(actual.rest, expected.rest, tolerance, "rest");
          ExpectClose(group->Sum(own.hidden), all.hidden, tolerance, "d hidden");
          ExpectClose(own.weight, Slice(all.weight, *group), tolerance, "d weight");
          for (const std::string& other : communicator.AllGatherBytes(Bytes(actual.divergences))) {
            EXPECT_TRUE(other == Bytes(actual.divergences)) << "ranks see other bits";
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tandem::parallel
