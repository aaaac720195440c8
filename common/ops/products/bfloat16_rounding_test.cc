#include "common/ops/products/bfloat16_rounding.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "common/ops/linear/embedding_weight.h"
#include "common/ops/products/packed_weight.h"

namespace tandem::ops {
namespace {

at::Tensor BitsOf(const at::Tensor& x) { return x.view(at::kInt); }

at::Tensor FromBits(const at::Tensor& bits) { return bits.to(at::kInt).view(at::kFloat); }

// Random bits: values of every exponent, infinities and NaN among them. Then bits on both sides of
// a tie and on it, below an even and an odd bfloat16, of every exponent and sign: subnormal numbers
// and the step to infinity are among them.
at::Tensor AllKinds() {
  at::manual_seed(3);
  const at::Tensor random =
      at::randint(-(int64_t{1} << 31), int64_t{1} << 31, {100'000}, at::kLong);
  const at::Tensor exponents = at::arange(0, 512, at::kLong).unsqueeze(1).mul(1 << 23);
  const at::Tensor ties = at::tensor(
      {0x0, 0x1, 0x7fff, 0x8000, 0x8001, 0x17fff, 0x18000, 0x18001, 0x7f7fff, 0x7f8000, 0x7fffff},
      at::kLong);
  const at::Tensor bits = at::cat({random, (exponents + ties).flatten()});
  return FromBits(bits.where(bits.lt(int64_t{1} << 31), bits - (int64_t{1} << 32)));
}

TEST(Bfloat16RoundingTest, IsThatOfATensorsConversion) {
  const at::Tensor x = AllKinds(), rounded = Rounded(x),
                   expected = x.to(at::kBFloat16).to(at::kFloat);
  const at::Tensor numbers = x.isnan().logical_not();
  EXPECT_TRUE(x.isnan().any().item<bool>());
  EXPECT_TRUE(at::equal(rounded.isnan(), x.isnan()));
  EXPECT_TRUE(
      at::equal(BitsOf(rounded).masked_select(numbers), BitsOf(expected).masked_select(numbers)));
}

TEST(Bfloat16RoundingTest, IsThatOfPackedWeights) {
  const at::Tensor x = AllKinds(), values = x.narrow(0, 0, x.numel() / 64 * 64).view({-1, 64});
  if (!PackedWeight::IsSupported()) GTEST_SKIP() << "no kernels for packed weights";
  const at::NoGradGuard no_grad;
  PackedWeight packed(kernels::WeightFormat::kBfloat16, values.size(0), 64);
  packed.SetRows(0, values);
  EXPECT_TRUE(at::equal(BitsOf(Rounded(values)),
                        BitsOf(packed.Rows(at::arange(values.size(0), at::kLong)))));
}

TEST(Bfloat16RoundingTest, RoundsInPlaceAndWhateverTheThreads) {
  const at::Tensor x = AllKinds(), expected = BitsOf(Rounded(x)), once = x.clone();
  const int threads = at::get_num_threads();
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    once.copy_(x);
    const auto version = once._version();
    CopyRounded(once, once);
    EXPECT_TRUE(at::equal(BitsOf(once), expected));
    EXPECT_GT(once._version(), version) << "autograd must see the change";
  }
  at::set_num_threads(threads);
  EXPECT_THROW(CopyRounded(at::ones({3, 4}), at::ones({4, 3})), c10::Error);
  EXPECT_THROW(CopyRounded(at::ones({3, 4}).t(), at::ones({4, 3})), c10::Error);
}

// A sum with the difference would be 0 for the first value and NaN for the last.
TEST(Bfloat16RoundingTest, TheGradientPassesThroughAndBitsAreThoseOfInference) {
  const at::Tensor x =
      at::tensor({-1e-45f, 1.003f, std::numeric_limits<float>::infinity()}).requires_grad_();
  const at::Tensor y = Rounded(x), dy = at::tensor({1.001f, 2.002f, 3.003f});
  y.backward(dy);
  EXPECT_TRUE(at::equal(x.grad(), dy)) << "not rounded";
  EXPECT_TRUE(std::signbit(y[0].item<float>()));
  EXPECT_EQ(y[1].item<float>(), 1.0f);
  EXPECT_TRUE(std::isinf(y[2].item<float>()));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(BitsOf(Rounded(x)), BitsOf(y.detach())));
}

TEST(Bfloat16RoundingTest, AnEmbeddingRoundsItsRowsAndTrainsItsMasters) {
  at::manual_seed(3);
  const at::Tensor masters = at::randn({9, 5}).requires_grad_(), dy = at::randn({4, 5});
  const at::Tensor tokens = at::tensor({8, 0, 3, 8}, at::kLong);
  const at::Tensor rows = EmbeddingWeight(masters, /*rounds=*/true).Forward(tokens);
  EXPECT_TRUE(at::equal(rows, Rounded(masters.detach()).index_select(0, tokens)));
  EXPECT_FALSE(at::equal(rows, masters.index_select(0, tokens)));
  rows.backward(dy);
  EXPECT_TRUE(at::equal(masters.grad(), at::zeros({9, 5}).index_add(0, tokens, dy)));
}

}  // namespace
}  // namespace tandem::ops
