#include "common/ops/linear/grouped_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::ops {
namespace {

constexpr int64_t kIn = 37, kOut = 21;  // a stack of two maps, of 8 and 13 outputs

// Five maps: no rows, one row, rows for several tiles, none, and a few.
const std::vector<int64_t> kOffsets = {0, 0, 1, 131, 131, 138};

struct Maps {
  // With `rounds` maps that round their inputs.
  explicit Maps(bool trains = false, bool rounds = false) {
    at::manual_seed(5);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor stack = at::randn({kOut, kIn});
      std::vector<at::Tensor> masters = {stack.narrow(0, 0, 8).detach(),
                                         stack.narrow(0, 8, 13).detach()};
      for (at::Tensor& master : masters) master.set_requires_grad(trains);
      weights.push_back(
          std::make_unique<LinearWeight>(stack, at::Tensor(), masters, std::vector<at::Tensor>(),
                                         rounds ? at::kBFloat16 : at::kFloat, rounds));
      pointers.push_back(weights.back().get());
    }
  }

  std::vector<std::unique_ptr<LinearWeight>> weights;
  std::vector<const LinearWeight*> pointers;
};

// The product of every map with its rows, each by itself.
at::Tensor OneByOne(const at::Tensor& x, const std::vector<const LinearWeight*>& maps) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < maps.size(); ++i) {
    const int64_t rows = kOffsets[i + 1] - kOffsets[i];
    if (rows > 0) parts.push_back(maps[i]->Forward(x.narrow(0, kOffsets[i], rows)));
  }
  return at::cat(parts);
}

TEST(GroupedLinearTest, RowsHaveTheBitsOfALinearMap) {
  const at::NoGradGuard no_grad;
  const Maps maps;
  const at::Tensor x = at::randn({kOffsets.back(), kIn});
  const at::Tensor y = GroupedLinear(x, kOffsets, maps.pointers);
  EXPECT_TRUE(at::equal(y, OneByOne(x, maps.pointers)));
  kernels::UseCpuKernels(&kernels::kAtenKernels);
  const at::Tensor aten = GroupedLinear(x, kOffsets, maps.pointers);
  kernels::UseCpuKernels(nullptr);
  EXPECT_TRUE(at::allclose(y, aten, 1e-5, 1e-5));
}

TEST(GroupedLinearTest, PackedMapsHaveTheBitsOfALinearMap) {
  if (!PackedWeight::IsSupported()) GTEST_SKIP();
  const at::NoGradGuard no_grad;
  const Maps dense;
  const at::Tensor x = at::randn({kOffsets.back(), kIn});
  for (const auto format : {kernels::WeightFormat::kFloat32, kernels::WeightFormat::kBfloat16,
                            kernels::WeightFormat::kInt8, kernels::WeightFormat::kInt4}) {
    std::vector<std::unique_ptr<LinearWeight>> packed;
    std::vector<const LinearWeight*> pointers;
    for (const LinearWeight* map : dense.pointers) {
      auto weight = std::make_shared<PackedWeight>(format, kOut, kIn);
      weight->SetRows(0, map->compute_weight());
      packed.push_back(std::make_unique<LinearWeight>(std::move(weight), at::Tensor(),
                                                      std::vector<at::Tensor>()));
      pointers.push_back(packed.back().get());
    }
    EXPECT_TRUE(at::equal(GroupedLinear(x, kOffsets, pointers), OneByOne(x, pointers)));

    const at::AutoGradMode grad(true);
    const at::Tensor leaf = x.detach().clone().requires_grad_(),
                     each = x.detach().clone().requires_grad_();
    const at::Tensor together = GroupedLinear(leaf, kOffsets, pointers);
    const at::Tensor dy = at::randn(together.sizes());
    together.backward(dy);
    OneByOne(each, pointers).backward(dy);
    EXPECT_TRUE(at::equal(together, OneByOne(x, pointers)));
    EXPECT_TRUE(at::equal(leaf.grad(), each.grad()));
  }
}

TEST(GroupedLinearTest, MapsThatRoundInputsHaveTheBitsOfALinearMap) {
  if (!PackedWeight::IsSupported()) GTEST_SKIP();
  const at::NoGradGuard no_grad;
  const Maps dense(/*trains=*/false, /*rounds=*/true);
  const at::Tensor x = at::randn({kOffsets.back(), kIn});
  std::vector<std::unique_ptr<LinearWeight>> packed;
  std::vector<const LinearWeight*> pointers;
  for (const LinearWeight* map : dense.pointers) {
    auto weight = std::make_shared<PackedWeight>(kernels::WeightFormat::kBfloat16, kOut, kIn);
    weight->SetRows(0, map->compute_weight());
    packed.push_back(std::make_unique<LinearWeight>(
        std::move(weight), at::Tensor(), std::vector<at::Tensor>(), /*rounds_inputs=*/true));
    pointers.push_back(packed.back().get());
  }
  const at::Tensor y = GroupedLinear(x, kOffsets, pointers);
  EXPECT_TRUE(at::equal(y, OneByOne(x, pointers)));
  EXPECT_TRUE(at::equal(y, GroupedLinear(x, kOffsets, dense.pointers)));
}

void ExpectGradientsOfTheSingleMaps(bool rounds) {
  const Maps maps(/*trains=*/true, rounds), single(/*trains=*/true, rounds);
  // One master has a gradient from before, to which is added in place.
  const at::Tensor before = at::randn({8, kIn});
  for (const Maps* both : {&maps, &single}) {
    at::Tensor master = both->weights[2]->masters()[0];
    master.mutable_grad() = before.clone();
  }
  const void* const memory = maps.weights[2]->masters()[0].grad().const_data_ptr();
  at::Tensor x = at::randn({kOffsets.back(), kIn}).requires_grad_();
  at::Tensor x_single = x.detach().clone().requires_grad_();
  const at::Tensor y = GroupedLinear(x, kOffsets, maps.pointers);
  const at::Tensor expected = OneByOne(x_single, single.pointers);
  EXPECT_TRUE(at::equal(y, expected));
  const at::Tensor dy = at::randn(y.sizes());
  y.backward(dy);
  expected.backward(dy);
  EXPECT_TRUE(at::allclose(x.grad(), x_single.grad(), 1e-5, 1e-5));
  EXPECT_EQ(maps.weights[2]->masters()[0].grad().const_data_ptr(), memory);
  for (size_t i = 0; i < maps.weights.size(); ++i) {
    for (size_t m = 0; m < 2; ++m) {
      const at::Tensor gradient = maps.weights[i]->masters()[m].grad();
      ASSERT_EQ(gradient.defined(), kOffsets[i] < kOffsets[i + 1]) << i;
      if (!gradient.defined()) continue;
      EXPECT_TRUE(at::allclose(gradient, single.weights[i]->masters()[m].grad(), 1e-5, 1e-5));
    }
  }
}

TEST(GroupedLinearTest, GradientsAreThoseOfTheSingleMaps) {
  ExpectGradientsOfTheSingleMaps(/*rounds=*/false);
}

TEST(GroupedLinearTest, GradientsOfMapsThatRoundInputsAreThoseOfTheSingleMaps) {
  ExpectGradientsOfTheSingleMaps(/*rounds=*/true);
}

}  // namespace
}  // namespace tandem::ops
