#include "common/speculator/heads/argmax_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tandem::speculator {
namespace {

// Small integers: sums are exact, and most rows have the greatest sum in several tiles.
at::Tensor Integers(int64_t rows) {
  return at::randint(-1, 2, {rows, 4}, at::kLong).to(at::kFloat);
}

TEST(ArgmaxRowsTest, TheLowestIndexWinsWithinAndAcrossTilesAndChunks) {
  at::manual_seed(3);
  const at::Tensor x = Integers(1100), weight = Integers(20000);
  const at::Tensor found = ArgmaxRows(x, weight);
  ASSERT_EQ(found.sizes(), at::IntArrayRef({1100}));
  const at::Tensor logits = x.matmul(weight.t());
  for (int64_t row = 0; row < x.size(0); ++row) {
    const float* const begin = logits[row].const_data_ptr<float>();
    ASSERT_EQ(found[row].item<int64_t>(), std::max_element(begin, begin + 20000) - begin) << row;
  }
  // A new maximum in the last tile wins.
  const at::Tensor last = at::cat({weight, at::full({1, 4}, 2.0)});
  EXPECT_EQ(ArgmaxRows(at::ones({600, 4}), last).eq(20000).sum().item<int64_t>(), 600);
}

TEST(ArgmaxRowsTest, NoRowsGiveNoIndices) {
  EXPECT_EQ(ArgmaxRows(at::ones({0, 4}), at::ones({9, 4})).numel(), 0);
}

}  // namespace
}  // namespace tandem::speculator
