#include "common/ops/expert_rows.h"

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
