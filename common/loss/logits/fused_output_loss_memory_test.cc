// The memory of the logits stays within logits_chunk_bytes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "common/loss/logits/linear_cross_entropy.h"
#include "common/loss/supervised_loss.h"
#include "common/loss/testing/metered_memory.h"

namespace tandem::loss {
namespace {

TEST(FusedOutputLossMemoryTest, PeakStaysWithinTheBudget) {
  constexpr int64_t kRows = 300, kHidden = 16, kVocabulary = 10000, kBudget = 1 << 20;
  const MeteredMemory meter;
  at::manual_seed(1);
  const at::Tensor hidden = at::randn({kRows, kHidden}), weight = at::randn({kVocabulary, kHidden});
  OutputRows rows;
  for (int64_t row = 0; row < kRows; ++row) {
    rows.positions.push_back(row);
    rows.labels.push_back(row % kVocabulary);
  }
  OutputGradients gradients = {.hidden = at::zeros_like(hidden), .weight = at::zeros_like(weight)};
  const std::vector<double> scales(kRows, 1.0 / kRows);
  for (const LossImpl impl : {LossImpl::kTiles, LossImpl::kRows, LossImpl::kAten}) {
    for (const LossMode mode : {LossMode::kGradientInForward, LossMode::kRecompute}) {
      SCOPED_TRACE(testing::Message() << LossImplName(impl) << " " << static_cast<int>(mode));
      auto loss =
          LinearCrossEntropyLoss::Create(weight, {.impl = impl, .logits_chunk_bytes = kBudget})
              .value();
      const int64_t start = meter->live();
      meter->Restart();
      for (int step = 0; step < 2; ++step) {
        SupervisedLossEvaluator evaluator(scales);
        ASSERT_TRUE(loss->ForwardBackward(
                            hidden, rows,
                            [&](auto... arguments) { return evaluator.Evaluate(arguments...); },
                            gradients, mode)
                        .ok());
      }
      // Beside the logits there are only buffers with H numbers, or a few numbers, per row.
      const bool keep = mode == LossMode::kGradientInForward;
      const int64_t budget = keep ? kBudget : kBudget / 4;
      const int64_t small = (keep ? loss->chunk_rows() : kRows) * (2 * kHidden + 128) * 8;
      EXPECT_LE(meter->peak() - start, budget + small);
      EXPECT_GT(meter->peak() - start, budget / 2);
      EXPECT_LT(budget + small, kRows * kVocabulary * 4 / 4);  // far below the whole logits
    }
  }
}

}  // namespace
}  // namespace tandem::loss
