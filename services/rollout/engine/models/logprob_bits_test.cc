// A token's log-probability has the same bits where it is drawn and where it is trained on.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/coauthoring/tandem_sampler.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/ops/ops.h"

namespace tandem {
namespace {

// With a vocabulary of several tiles, and with as many rows as threads divide.
void ExpectTheSamplersAreThoseOfTheTrainersLoss(std::optional<double> soft_cap) {
  constexpr int64_t kTokens = 2 * loss::kTileColumns + 907, kManyRows = 300;
  at::manual_seed(3);
  const at::Tensor hidden = at::randn({kManyRows, 100}), weight = at::randn({kTokens, 100}) * 0.3;
  loss::OutputRows rows;
  for (int64_t row = 0; row < kManyRows; ++row) {
    rows.positions.push_back(row);
    rows.labels.push_back(row * 7919 % kTokens);
    rows.temperatures.push_back(row % 2 ? 1.0 : 0.7);
  }
  auto output_loss = loss::LinearCrossEntropyLoss::Create(weight, {.soft_cap = soft_cap}).value();
  ASSERT_EQ(output_loss->impl(), loss::LossImpl::kTiles);
  const std::vector<double> logprobs = output_loss->LogProbs(hidden, rows).value().logprobs;
  std::vector<double> in_forward;
  const auto keep = [&](int64_t, absl::Span<const double> values, auto&&...) {
    in_forward.insert(in_forward.end(), values.begin(), values.end());
    return absl::OkStatus();
  };
  loss::OutputGradients gradients = {.hidden = at::zeros_like(hidden)};
  ASSERT_TRUE(
      output_loss
          ->ForwardBackward(hidden, rows, keep, gradients, loss::LossMode::kGradientInForward)
          .ok());
  TandemSampler sampler;
  for (int64_t row = 0; row < kManyRows; ++row) {
    // One row at a time, as a server decodes.
    at::Tensor logits = ops::Linear(hidden.narrow(0, row, 1), weight);
    if (soft_cap.has_value()) logits = ops::SoftCap(logits, *soft_cap);
    const std::span<const float> values(logits.const_data_ptr<float>(), kTokens);
    const float logprob =
        sampler.TokenLogProb(values, rows.temperatures[row], static_cast<int32_t>(rows.labels[row]))
            .value();
    EXPECT_EQ(static_cast<float>(logprobs[row]), logprob) << row;
    EXPECT_EQ(static_cast<float>(in_forward[row]), logprob) << row;
  }
}

TEST(LogProbBitsTest, TheSamplersAreThoseOfTheTrainersLoss) {
  ExpectTheSamplersAreThoseOfTheTrainersLoss({});
}

TEST(LogProbBitsTest, TheSamplersAreThoseOfTheTrainersLossWithASoftCap) {
  ExpectTheSamplersAreThoseOfTheTrainersLoss(4.0);
}

}  // namespace
}  // namespace tandem
