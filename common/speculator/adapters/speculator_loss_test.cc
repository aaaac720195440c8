// The loss and its gradients against an oracle in float64, on padded rows.
#include "common/speculator/adapters/speculator_loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/speculator/testing/cases.h"
#include "common/speculator/testing/oracle.h"

namespace tandem::speculator {
namespace {

// Rows of at most kSteps + 1 tokens have nothing to learn from.
const std::vector<int64_t> kLengths = {9, 3, 6, 4, 5};
constexpr int64_t kLongest = 9;

// Sequences of mixed lengths side by side, [B, kLongest]; tokens and labels beyond a length are
// valid ids, so that a loss which reads them differs.
struct Padded {
  Padded() {
    at::manual_seed(11);
    const auto count = static_cast<int64_t>(kLengths.size());
    hidden = at::randn({count, kLongest, kHidden}, at::kDouble);
    tokens = at::randint(kVocabulary, {count, kLongest}, at::kLong);
    labels = at::where(at::rand({count, kLongest}) < 0.3, kIgnoredLabel, tokens);
  }

  // Every token of the padded batch, sequences in their rows.
  SpeculatorBatch InRows() const {
    SpeculatorBatch batch = {.hidden = hidden.flatten(0, 1),
                             .tokens = tokens.flatten(),
                             .sequences = {},
                             .labels = Labels(labels.flatten())};
    for (size_t s = 0; s < kLengths.size(); ++s) {
      batch.sequences.push_back({static_cast<int64_t>(s) * kLongest, kLengths[s]});
    }
    return batch;
  }

  // The sequences [first, end) without padding.
  SpeculatorBatch Packed(size_t first = 0, size_t end = kLengths.size()) const {
    std::vector<at::Tensor> of_hidden, of_tokens, of_labels;
    std::vector<int64_t> offsets = {0};
    for (size_t s = first; s < end; ++s) {
      const auto row = static_cast<int64_t>(s);
      of_hidden.push_back(hidden[row].narrow(0, 0, kLengths[s]));
      of_tokens.push_back(tokens[row].narrow(0, 0, kLengths[s]));
      of_labels.push_back(labels[row].narrow(0, 0, kLengths[s]));
      offsets.push_back(offsets.back() + kLengths[s]);
    }
    return {.hidden = at::cat(of_hidden),
            .tokens = at::cat(of_tokens),
            .sequences = PackedSequences(offsets),
            .labels = Labels(at::cat(of_labels))};
  }

  static std::vector<int64_t> Labels(const at::Tensor& labels) {
    const at::Tensor flat = labels.contiguous();
    return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
  }

  at::Tensor hidden, tokens, labels;
};

// The definition: each sequence alone, each head's mean over the targets of all.
SpeculatorLossReport Expected(const Speculator& speculator, const Padded& padded) {
  const Oracle oracle(speculator);
  SpeculatorLossReport report;
  report.heads.resize(kSteps);
  for (size_t s = 0; s < kLengths.size(); ++s) {
    const auto row = static_cast<int64_t>(s);
    for (int64_t t = 0; t < kLengths[s] - kSteps - 1; ++t) {
      std::vector<int64_t> tokens;
      for (int64_t i = 0; i < kSteps; ++i) {
        tokens.push_back(padded.tokens[row][t + 1 + i].item<int64_t>());
      }
      const auto logits = oracle.Logits(ToMatrix(padded.hidden[row][t]).values, tokens);
      for (int64_t i = 0; i < kSteps; ++i) {
        const int64_t label = padded.labels[row][t + i + 2].item<int64_t>();
        if (label == kIgnoredLabel) continue;
        const Numbers& of_head = logits[static_cast<size_t>(i)];
        double sum = 0;
        for (const double logit : of_head) sum += std::exp(logit);
        HeadReport& head = report.heads[static_cast<size_t>(i)];
        head.loss += std::log(sum) - of_head[static_cast<size_t>(label)];
        head.targets += 1;
        head.correct += Oracle::Argmax(of_head) == label;
      }
    }
  }
  for (HeadReport& head : report.heads) {
    head.loss /= static_cast<double>(head.targets);
    report.loss += head.loss;
  }
  return report;
}

void ExpectSame(const SpeculatorLossReport& actual, const SpeculatorLossReport& expected,
                double tolerance) {
  EXPECT_NEAR(actual.loss, expected.loss, tolerance * expected.loss);
  ASSERT_EQ(actual.heads.size(), expected.heads.size());
  for (size_t i = 0; i < expected.heads.size(); ++i) {
    const double loss = expected.heads[i].loss;
    EXPECT_NEAR(actual.heads[i].loss, loss, tolerance * loss);
    EXPECT_EQ(actual.heads[i].targets, expected.heads[i].targets);
    EXPECT_EQ(actual.heads[i].correct, expected.heads[i].correct);
  }
}

// The gradients of all parameters, in their order.
std::vector<at::Tensor> Gradients(const Speculator& speculator) {
  std::vector<at::Tensor> gradients;
  for (const SpeculatorParameter& parameter : speculator.parameters()) {
    gradients.push_back(parameter.value.grad());
  }
  return gradients;
}

double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

class SpeculatorLossTest : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Speculator> Make(at::ScalarType dtype = at::kDouble) const {
    return TinySpeculator(GetParam().config, {.requires_grad = true, .dtype = dtype});
  }

  const Padded padded_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, SpeculatorLossTest, testing::ValuesIn(Cases()), NameOf);

TEST_P(SpeculatorLossTest, PackedAndPaddedBatchesHaveTheOraclesLoss) {
  const auto speculator = Make();
  const SpeculatorLoss loss(*speculator);
  const SpeculatorLossReport expected = Expected(*speculator, padded_);
  ASSERT_GT(expected.heads.back().targets, 3);
  for (const SpeculatorBatch& batch : {padded_.Packed(), padded_.InRows()}) {
    const auto evaluated = loss.Evaluate(batch);
    ASSERT_TRUE(evaluated.ok()) << evaluated.status();
    ExpectSame(*evaluated, expected, 1e-12);
    const auto trained = loss.ForwardBackward(batch);
    ASSERT_TRUE(trained.ok()) << trained.status();
    ExpectSame(*trained, expected, 1e-12);
  }
  const auto single = Make(at::kFloat);
  ExpectSame(SpeculatorLoss(*single).Evaluate(padded_.Packed()).value(), Expected(*single, padded_),
             1e-6);
}

TEST_P(SpeculatorLossTest, GradientsAreTheDifferencesOfTheOracle) {
  const auto speculator = Make();
  SpeculatorBatch batch = padded_.Packed();
  batch.hidden = batch.hidden.detach().requires_grad_();
  ASSERT_TRUE(SpeculatorLoss(*speculator, {.coefficient = 0.5}).ForwardBackward(batch).ok());

  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;
  const auto differences = [&](const at::Tensor& values, const Padded& padded) {
    at::Tensor slopes = at::empty_like(values);
    double* const value = values.data_ptr<double>();
    double* const slope = slopes.data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      const double kept = value[i];
      value[i] = kept + kStep;
      const double above = Expected(*speculator, padded).loss;
      value[i] = kept - kStep;
      slope[i] = 0.5 * (above - Expected(*speculator, padded).loss) / (2 * kStep);
      value[i] = kept;
    }
    return slopes;
  };
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    const at::Tensor expected = differences(parameter.value.detach(), padded_);
    // The first step has no cell to forget.
    if (parameter.spec.name == "forget_proj.0.weight") {
      EXPECT_EQ(parameter.value.grad().abs().max().item<double>(), 0);
      continue;
    }
    EXPECT_GT(expected.abs().max().item<double>(), 1e-4) << parameter.spec.name;
    EXPECT_LT(RelativeError(parameter.value.grad(), expected), 1e-6) << parameter.spec.name;
  }
  const Padded copy = padded_;
  const at::Tensor of_hidden = differences(copy.hidden, copy);
  std::vector<at::Tensor> packed;
  for (size_t s = 0; s < kLengths.size(); ++s) {
    packed.push_back(of_hidden[static_cast<int64_t>(s)].narrow(0, 0, kLengths[s]));
  }
  EXPECT_LT(RelativeError(batch.hidden.grad(), at::cat(packed)), 1e-6);
}

TEST_P(SpeculatorLossTest, Float32GradientsAreThoseOfFloat64) {
  const auto exact = Make(), single = Make(at::kFloat);
  {
    const at::NoGradGuard no_grad;
    exact->buffer().copy_(single->buffer());
  }
  ASSERT_TRUE(SpeculatorLoss(*exact).ForwardBackward(padded_.Packed()).ok());
  ASSERT_TRUE(SpeculatorLoss(*single).ForwardBackward(padded_.Packed()).ok());
  const std::vector<at::Tensor> expected = Gradients(*exact), actual = Gradients(*single);
  for (size_t i = 0; i < expected.size(); ++i) {
    const std::string& name = exact->parameters()[i].spec.name;
    if (name == "forget_proj.0.weight") continue;  // zero
    EXPECT_LT(RelativeError(actual[i].to(at::kDouble), expected[i]), 1e-5) << name;
  }
}

TEST_P(SpeculatorLossTest, MicroBatchesAddUp) {
  const auto whole = Make(), cut = Make();
  const SpeculatorBatch batch = padded_.Packed();
  const SpeculatorLossReport expected = SpeculatorLoss(*whole).ForwardBackward(batch).value();
  const auto rows = AlignRows(batch.sequences, batch.labels, kSteps, kVocabulary).value();
  const SpeculatorLoss loss(*cut, {.target_counts = rows.TargetCounts()});
  double sum = 0;
  for (const auto& [first, end] : {std::pair<size_t, size_t>{0, 2}, {2, 3}, {3, 5}}) {
    sum += loss.ForwardBackward(padded_.Packed(first, end)).value().loss;
  }
  EXPECT_NEAR(sum, expected.loss, 1e-12);
  const std::vector<at::Tensor> left = Gradients(*whole), right = Gradients(*cut);
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(at::allclose(left[i], right[i], 1e-9, 1e-12)) << i;
  }
}

TEST_P(SpeculatorLossTest, PaddingRowsOfTheVocabularyHaveNoGradient) {
  const auto speculator =
      TinySpeculator(GetParam().config, {.num_token_ids = kVocabulary - 2, .requires_grad = true});
  SpeculatorBatch batch = padded_.Packed();
  for (int64_t& label : batch.labels) label = std::min<int64_t>(label, kVocabulary - 3);
  ASSERT_TRUE(SpeculatorLoss(*speculator).ForwardBackward(batch).ok());
  const at::Tensor gradient = speculator->head(0).grad();
  EXPECT_EQ(gradient.narrow(0, kVocabulary - 2, 2).count_nonzero().item<int64_t>(), 0);
  EXPECT_GT(gradient.count_nonzero().item<int64_t>(), 0);
}

class SpeculatorBatchTest : public testing::Test {
 protected:
  std::optional<std::string> Field(const SpeculatorBatch& batch,
                                   SpeculatorLossOptions options = {}) const {
    const absl::Status status =
        SpeculatorLoss(*speculator_, std::move(options)).ForwardBackward(batch).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return FieldPath(status);
  }

  const std::unique_ptr<Speculator> speculator_ =
      TinySpeculator(MlpJson(), {.requires_grad = true});
  const SpeculatorBatch batch_ = Padded().Packed();
};

TEST_F(SpeculatorBatchTest, BadBatchesAreRefusedByField) {
  SpeculatorBatch bad = batch_;
  bad.labels[4] = kVocabulary;
  EXPECT_EQ(Field(bad), "labels[4]");
  bad.labels[4] = -1;
  EXPECT_EQ(Field(bad), "labels[4]");
  bad = batch_;
  bad.hidden = bad.hidden.narrow(1, 0, 2);
  EXPECT_EQ(Field(bad), "hidden");
  bad = batch_;
  bad.tokens = bad.tokens.narrow(0, 0, 2);
  EXPECT_EQ(Field(bad), "tokens");
  bad = batch_;
  bad.sequences[1].length = 100;
  EXPECT_EQ(Field(bad), "sequences[1]");
  bad.sequences[1] = {.begin = -1, .length = 5};
  EXPECT_EQ(Field(bad), "sequences[1]");
  EXPECT_EQ(Field(batch_, {.coefficient = 0}), "coefficient");
  EXPECT_EQ(Field(batch_, {.target_counts = {1}}), "target_counts");
  EXPECT_EQ(Field(batch_, {.target_counts = {100, 1, 100}}), "target_counts[1]");
}

TEST_F(SpeculatorBatchTest, AHeadWithoutTargetsHasNoLoss) {
  SpeculatorBatch batch = batch_;
  batch.labels.assign(batch.labels.size(), kIgnoredLabel);
  batch.labels[2] = 1;  // a target of head 0 alone
  const SpeculatorLossReport one = SpeculatorLoss(*speculator_).ForwardBackward(batch).value();
  EXPECT_EQ(one.heads[0].targets, 1);
  EXPECT_EQ(one.heads[1].targets, 0);
  EXPECT_EQ(one.heads[1].loss, 0);
  EXPECT_EQ(one.loss, one.heads[0].loss);

  batch.sequences = {{.begin = 0, .length = kSteps + 1}};
  const SpeculatorLossReport none = SpeculatorLoss(*speculator_).ForwardBackward(batch).value();
  EXPECT_EQ(none.loss, 0);
  ASSERT_EQ(none.heads.size(), static_cast<size_t>(kSteps));
  EXPECT_EQ(none.heads[0].correct, 0);
}

TEST_F(SpeculatorBatchTest, ASpeculatorWithoutGradientsDoesNotTrain) {
  const auto frozen = TinySpeculator(MlpJson());
  EXPECT_EQ(SpeculatorLoss(*frozen).ForwardBackward(batch_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(SpeculatorLoss(*frozen).Evaluate(batch_).ok());
}

TEST_F(SpeculatorBatchTest, LogitsThatAreNotFiniteAreAnError) {
  SpeculatorBatch batch = batch_;
  batch.hidden = at::full_like(batch.hidden, std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(IsNotFinite(SpeculatorLoss(*speculator_).ForwardBackward(batch).status()));
  EXPECT_TRUE(IsNotFinite(SpeculatorLoss(*speculator_).Evaluate(batch).status()));
}

}  // namespace
}  // namespace tandem::speculator
