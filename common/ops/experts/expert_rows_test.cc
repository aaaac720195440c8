#include "common/ops/experts/expert_rows.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::ops {
namespace {

using testing::ElementsAre;

TEST(ExpertRowsTest, RowsAreSortedByExpertThenToken) {
  const at::Tensor experts = at::tensor({2, 3, 0, 2, 2, 3}, at::kLong).view({3, 2});
  const ExpertRows order = ExpertRows::Of(experts, 5);
  EXPECT_THAT(order.offsets, ElementsAre(0, 1, 1, 4, 6, 6));
  EXPECT_TRUE(at::equal(order.tokens, at::tensor({1, 0, 1, 2, 0, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(order.rows, at::tensor({1, 4, 0, 2, 3, 5}, at::kLong).view({3, 2})));
}

// The rows and sums of two ranges of experts add up to those of all.
TEST(ExpertRowsTest, RangesHaveTheRowsOfTheirExpertsAlone) {
  const at::Tensor experts = at::tensor({2, 3, 0, 2, 2, 3}, at::kLong).view({3, 2});
  const ExpertRows order = ExpertRows::OfRange(experts, 5, 2, 1);
  EXPECT_THAT(order.offsets, ElementsAre(0, 3));
  EXPECT_TRUE(at::equal(order.tokens, at::tensor({0, 1, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(order.rows, at::tensor({0, -1, -1, 1, 2, -1}, at::kLong).view({3, 2})));

  const at::Tensor x = at::arange(6, at::kFloat).view({3, 2}) + 1;
  const at::Tensor weights = at::tensor({1.0f, 2.0f, 4.0f, 8.0f, 16.0f, 32.0f}).view({3, 2});
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    at::Tensor sum = at::zeros({3, 2}, type);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 2}, {2, 1}, {3, 2}}) {
      const ExpertRows range = ExpertRows::OfRange(experts, 5, first, count);
      sum += CombineExpertRows(GatherExpertRows(x.to(type), range), weights, range);
    }
    EXPECT_TRUE(at::equal(sum.to(at::kFloat), x * weights.sum(1, /*keepdim=*/true))) << type;
    // No token chose expert 4.
    const ExpertRows none = ExpertRows::OfRange(experts, 5, 4, 1);
    EXPECT_TRUE(at::equal(CombineExpertRows(at::empty({0, 2}, type), weights, none),
                          at::zeros({3, 2}, type)));
  }
  EXPECT_THROW(CombineExpertRows(GatherExpertRows(x, order).requires_grad_(), weights, order),
               c10::NotImplementedError);
}

TEST(ExpertRowsTest, AnExpertThatIsNotThereThrows) {
  EXPECT_THROW(ExpertRows::Of(at::tensor({0, 5}, at::kLong).view({1, 2}), 5), c10::IndexError);
  EXPECT_THROW(ExpertRows::Of(at::tensor({0, -1}, at::kLong).view({1, 2}), 5), c10::IndexError);
}

TEST(ExpertRowsTest, ValuesAndGradientsAreThoseOfASumByToken) {
  at::manual_seed(3);
  constexpr int64_t kTokens = 23, kChoices = 3, kExperts = 6, kWidth = 17;
  const at::Tensor experts =
      std::get<1>(at::rand({kTokens, kExperts}).topk(kChoices, 1)).to(at::kLong);
  const ExpertRows order = ExpertRows::Of(experts, kExperts);
  at::Tensor x = at::randn({kTokens, kWidth}).requires_grad_();
  at::Tensor weights = at::rand({kTokens, kChoices}).requires_grad_();
  // Each expert multiplies by a number of its own.
  const at::Tensor factors = at::randn({kExperts});
  const at::Tensor by_row = factors.repeat_interleave(at::tensor(order.offsets, at::kLong).diff());
  const at::Tensor sum =
      CombineExpertRows(GatherExpertRows(x, order) * by_row.unsqueeze(1), weights, order);

  at::Tensor x64 = x.detach().to(at::kDouble).requires_grad_();
  at::Tensor weights64 = weights.detach().to(at::kDouble).requires_grad_();
  const at::Tensor scale =
      (weights64 * factors.to(at::kDouble).index({experts})).sum(1, /*keepdim=*/true);
  const at::Tensor expected = x64 * scale;
  EXPECT_TRUE(at::allclose(sum.to(at::kDouble), expected, 1e-6, 1e-6));

  const at::Tensor dy = at::randn({kTokens, kWidth});
  sum.backward(dy);
  expected.backward(dy.to(at::kDouble));
  EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), x64.grad(), 1e-6, 1e-6));
  EXPECT_TRUE(at::allclose(weights.grad().to(at::kDouble), weights64.grad(), 1e-5, 1e-5));
}

}  // namespace
}  // namespace tandem::ops
