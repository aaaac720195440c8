#include "common/ops/products/packed_weight.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/ops/linear/embedding_weight.h"
#include "common/ops/linear/linear_weight.h"
#include "common/ops/ops.h"

namespace tandem::ops {
namespace {

using kernels::WeightFormat;

constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kBfloat16,
                                     WeightFormat::kInt8, WeightFormat::kInt4};

// A packed matrix of random values.
std::shared_ptr<const PackedWeight> RandomWeight(WeightFormat format, int64_t out, int64_t in) {
  at::manual_seed(5);
  auto weight = std::make_shared<const PackedWeight>(format, out, in);
  weight->SetRows(0, at::randn({out, in}));
  return weight;
}

at::Tensor AllRows(const PackedWeight& weight) {
  return weight.Rows(at::arange(weight.out(), at::kLong));
}

class OpsPackedWeightTest : public testing::Test {
 protected:
  OpsPackedWeightTest() : threads_(at::get_num_threads()) {}
  ~OpsPackedWeightTest() override { at::set_num_threads(threads_); }

 private:
  const c10::InferenceMode inference_;
  const int threads_;
};

TEST_F(OpsPackedWeightTest, HasTheBitsOfTheDenseMapOfItsValuesWhateverTheThreads) {
  for (const WeightFormat format : kFormats) {
    const auto weight = RandomWeight(format, 150, 70);
    const at::Tensor values = AllRows(*weight), bias = at::randn({150});
    for (const int64_t rows : {0, 1, 5, 90}) {
      const at::Tensor x = at::randn({rows, 70});
      const at::Tensor expected = Linear(x, values, bias);
      for (const int threads : {1, 2, 3}) {
        at::set_num_threads(threads);
        EXPECT_TRUE(at::equal(weight->Linear(x, bias, 150), expected)) << rows << " " << threads;
        EXPECT_TRUE(
            at::equal(weight->Linear(x, bias.narrow(0, 0, 33), 33), expected.narrow(1, 0, 33)));
        const at::Tensor residual = at::ones({rows, 150});
        EXPECT_TRUE(at::equal(weight->LinearAdd(residual.clone(), x, bias), residual + expected));
      }
    }
  }
}

TEST_F(OpsPackedWeightTest, TakesRowsOfAnyTypeAndLayout) {
  const at::Tensor values = at::randn({40, 33}).to(at::kBFloat16);
  PackedWeight weight(WeightFormat::kBfloat16, 60, 33);
  weight.SetRows(20, values);
  EXPECT_TRUE(at::equal(AllRows(weight).narrow(0, 20, 40), values.to(at::kFloat)));
  EXPECT_TRUE(at::equal(AllRows(weight).narrow(0, 0, 20), at::zeros({20, 33})));
  const at::Tensor columns = at::randn({33, 7}, at::kDouble).to(at::kHalf).t();
  PackedWeight(WeightFormat::kFloat32, 7, 33).SetRows(0, columns);
  weight.SetRows(3, columns);
  EXPECT_TRUE(at::equal(AllRows(weight).narrow(0, 3, 7),
                        columns.to(at::kFloat).to(at::kBFloat16).to(at::kFloat)));
}

TEST_F(OpsPackedWeightTest, RefusesWhatDoesNotFit) {
  const PackedWeight weight(WeightFormat::kInt8, 20, 33);
  EXPECT_THROW(weight.SetRows(18, at::ones({3, 33})), c10::Error);
  EXPECT_THROW(weight.SetRows(0, at::ones({3, 32})), c10::Error);
  EXPECT_THROW(weight.Rows(at::tensor({20}, at::kLong)), c10::Error);
  EXPECT_THROW(weight.Rows(at::tensor({-1}, at::kLong)), c10::Error);
  EXPECT_THROW(weight.Linear(at::ones({2, 32}), {}, 20), c10::Error);
  EXPECT_THROW(weight.Linear(at::ones({2, 33}), {}, 21), c10::Error);
  EXPECT_THROW(weight.Linear(at::ones({2, 33}).to(at::kBFloat16), {}, 20), c10::Error);
}

TEST_F(OpsPackedWeightTest, AnEmbeddingGathersRows) {
  const auto weight = RandomWeight(WeightFormat::kInt4, 37, 50);
  const EmbeddingWeight packed(weight), dense(AllRows(*weight));
  const at::Tensor tokens = at::tensor({36, 0, 5, 36}, at::kLong);
  EXPECT_EQ(packed.rows(), 37);
  EXPECT_TRUE(at::equal(packed.Forward(tokens), dense.Forward(tokens)));
}

TEST_F(OpsPackedWeightTest, ALinearWeightMultipliesByItsPackedMaps) {
  const auto packed = RandomWeight(WeightFormat::kInt8, 21, 40);
  const at::Tensor bias = at::randn({21}), x = at::randn({3, 40});
  const LinearWeight linear(packed, bias, {bias});
  const at::Tensor expected = Linear(x, AllRows(*packed), bias);
  EXPECT_TRUE(at::equal(linear.Forward(x), expected));
  EXPECT_TRUE(at::equal(linear.Logits(x, 7), expected.narrow(1, 0, 7)));
  EXPECT_TRUE(at::equal(linear.ForwardAdd(at::ones({3, 21}), x), 1 + expected));
  EXPECT_THROW(linear.compute_weight(), c10::Error);
}

TEST_F(OpsPackedWeightTest, AnyOutputsHaveTheBitsOfTheWholeMap) {
  for (const WeightFormat format : kFormats) {
    const auto weight = RandomWeight(format, 150, 70);
    const at::Tensor x = at::randn({30, 70}), whole = weight->Linear(x, {}, 150);
    for (const auto& [first, count] : {std::pair{0, 150}, {16, 32}, {5, 40}, {149, 1}, {150, 0}}) {
      const at::Tensor all = at::zeros({30, count}), one = at::zeros({30, count});
      weight->LinearInto(all, x, first);
      weight->LinearInto(one, x, first, PackThreads::kOne);
      EXPECT_TRUE(at::equal(all, whole.narrow(1, first, count))) << first << " " << count;
      EXPECT_TRUE(at::equal(one, all)) << first << " " << count;
    }
    EXPECT_THROW(weight->LinearInto(at::zeros({30, 41}), x, 110), c10::Error);
  }
}

// The weights of 20,000 inputs are widened in several blocks.
TEST(PackedWeightGradientTest, GradientsOfInputsAreThoseOfTheValuesInFloat64) {
  const at::NoGradGuard no_grad;
  for (const WeightFormat format : kFormats) {
    for (const int64_t in : {70, 20000}) {
      const auto weight = RandomWeight(format, 150, in);
      const at::Tensor values = AllRows(*weight).to(at::kDouble);
      for (const auto& [first, count] :
           {std::pair{0, 150}, {16, 32}, {5, 140}, {149, 1}, {150, 0}}) {
        for (const int64_t rows : {0, 1, 40}) {
          const at::Tensor dy = at::randn({rows, count});
          const at::Tensor exact = dy.to(at::kDouble).mm(values.narrow(0, first, count));
          const at::Tensor dx = at::full({rows, in}, 3.0f), added = at::ones({rows, in});
          weight->InputGradientInto(dx, dy, first, /*accumulate=*/false);
          weight->InputGradientInto(added, dy, first, /*accumulate=*/true, PackThreads::kOne);
          // Sums of at most 150 products of numbers near 1, of magnitudes up to 60.
          EXPECT_TRUE(at::allclose(dx.to(at::kDouble), exact, 1e-6, 5e-5)) << first << " " << rows;
          EXPECT_TRUE(at::allclose(added.to(at::kDouble), exact + 1, 1e-6, 5e-5)) << first;
        }
      }
    }
  }
}

TEST(PackedWeightGradientTest, GradientsOfInputsDoNotDependOnTheThreads) {
  const at::NoGradGuard no_grad;
  const int before = at::get_num_threads();
  const auto weight = RandomWeight(WeightFormat::kInt8, 700, 5000);
  const at::Tensor dy = at::randn({70, 700});
  std::vector<at::Tensor> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    weight->InputGradientInto(results.emplace_back(at::empty({70, 5000})), dy, 0, false);
    EXPECT_TRUE(at::equal(results.back(), results.front()));
  }
  at::set_num_threads(before);
}

TEST(PackedWeightGradientTest, FlowsIntoTheInputAlone) {
  const auto packed = RandomWeight(WeightFormat::kInt8, 21, 40);
  const at::Tensor bias = at::randn({21});
  const LinearWeight linear(packed, bias, {bias});
  const at::Tensor x = at::randn({3, 40}).requires_grad_(), dy = at::randn({3, 21});
  const at::Tensor y = linear.Forward(x), constant = linear.Forward(x.detach());
  EXPECT_FALSE(constant.requires_grad());
  y.backward(dy);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(y, linear.Forward(x)));
  EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble),
                           dy.to(at::kDouble).mm(AllRows(*packed).to(at::kDouble)), 1e-6, 1e-5));
}

TEST(PackedWeightGradientTest, SomeColumnsHaveNone) {
  const LinearWeight linear(RandomWeight(WeightFormat::kFloat32, 21, 40), {}, {});
  EXPECT_THROW(linear.Logits(at::ones({3, 40}), 7), c10::Error);
}

}  // namespace
}  // namespace tandem::ops
