#include "common/loss/logits/row_statistics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tandem::loss {
namespace {

// Computes the statistics of the columns [begin, end) of the logits.
void FillTile(const at::Tensor& logits, const at::Tensor& labels, int64_t begin, int64_t end,
              const RowStatistics& tile) {
  const at::Tensor z = logits.slice(1, begin, end);
  const at::Tensor below = z - z.amax(1, /*keepdim=*/true);
  tile.max.copy_(z.amax(1));
  tile.sum.copy_(below.exp().sum(1));
  tile.weighted.copy_((below.exp() * below).sum(1));
  const at::Tensor inside = labels.ge(begin).logical_and(labels.lt(end));
  tile.label.copy_(logits.gather(1, labels.unsqueeze(1)).squeeze(1) * inside);
}

TEST(RowStatisticsTest, TilesOfTheVocabularyMergeIntoTheWhole) {
  at::manual_seed(1);
  const at::Tensor logits = at::randn({6, 40}, at::kDouble) * 30;
  const at::Tensor labels = at::tensor({0, 9, 10, 25, 39, 12}, at::kLong);
  const RowStatistics tiles = EmptyRowStatistics(3, 8, at::kDouble);
  const int64_t ends[] = {10, 11, 40};
  for (int64_t begin = 0, tile = 0; tile < 3; begin = ends[tile++]) {
    FillTile(logits, labels, begin, ends[tile], RowsOf(tiles, tile, 1, 6));
  }
  const auto rows = [](const at::Tensor& x) { return x.narrow(1, 1, 6); };
  const RowStatistics whole =
      MergeTiles({rows(tiles.max), rows(tiles.sum), rows(tiles.weighted), rows(tiles.label)});
  const at::Tensor log_softmax = at::log_softmax(logits, 1);
  const at::Tensor expected = log_softmax.gather(1, labels.unsqueeze(1)).squeeze(1);
  const RowLogProbs rows_of_whole = LogProbs(whole);
  const auto tensor = [](const std::vector<double>& x) { return at::tensor(x, at::kDouble); };
  EXPECT_TRUE(at::allclose(tensor(rows_of_whole.logprobs), expected, 1e-13, 1e-13));
  EXPECT_TRUE(at::allclose(tensor(rows_of_whole.entropies),
                           -(log_softmax.exp() * log_softmax).sum(1), 1e-13, 1e-13));
}

}  // namespace
}  // namespace tandem::loss
