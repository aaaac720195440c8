#include "common/ops/products/matrix_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <new>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::ops {
namespace {

class MatrixProductTest : public testing::TestWithParam<std::array<int64_t, 3>> {
 protected:
  MatrixProductTest() { at::manual_seed(1); }
  ~MatrixProductTest() override { at::set_num_threads(threads_before_); }

 private:
  const int threads_before_ = at::get_num_threads();
};

// m, n, k: one tile and many, long sums over few outputs, sizes of one.
INSTANTIATE_TEST_SUITE_P(
    Shapes, MatrixProductTest,
    testing::Values(std::array<int64_t, 3>{64, 64, 1024}, std::array<int64_t, 3>{33, 50, 1024},
                    std::array<int64_t, 3>{64, 576, 1536}, std::array<int64_t, 3>{300, 200, 40},
                    std::array<int64_t, 3>{1, 576, 700}, std::array<int64_t, 3>{700, 1, 9},
                    std::array<int64_t, 3>{1100, 1103, 16}, std::array<int64_t, 3>{0, 8, 8}));

TEST_P(MatrixProductTest, MatchesDoubleWhateverIsTransposed) {
  const auto [m, n, k] = GetParam();
  const at::Tensor a = at::randn({m, k}), b = at::randn({n, k}).t();
  const at::Tensor expected = at::mm(a.to(at::kDouble), b.to(at::kDouble));
  for (const at::Tensor& left : {a, a.t().contiguous().t()}) {
    for (const at::Tensor& right : {b, b.contiguous()}) {
      const at::Tensor product = MatrixProduct(left, right);
      ASSERT_EQ(product.sizes(), expected.sizes());
      EXPECT_TRUE(at::allclose(product.to(at::kDouble), expected, 1e-5, 3e-4));
    }
  }
}

TEST_P(MatrixProductTest, AccumulateAddsToTheProduct) {
  const auto [m, n, k] = GetParam();
  const at::Tensor a = at::randn({m, k}), b = at::randn({n, k}).t(), before = at::randn({m, n});
  const at::Tensor sum = before.clone();
  MatrixProductInto(sum, a, b, /*accumulate=*/true);
  EXPECT_TRUE(at::allclose(sum, before + MatrixProduct(a, b), 1e-5, 1e-4));
}

// A product of two bf16 numbers is exact in fp32; only the sums are rounded.
TEST_P(MatrixProductTest, Bfloat16FactorsAreSummedInFloat32) {
  const auto [m, n, k] = GetParam();
  const at::Tensor a = at::randn({m, k}, at::kBFloat16), b = at::randn({n, k}, at::kBFloat16).t();
  const at::Tensor expected = at::mm(a.to(at::kDouble), b.to(at::kDouble));
  for (const at::Tensor& left : {a, a.t().contiguous().t()}) {
    for (const at::Tensor& right : {b, b.contiguous()}) {
      at::Tensor product = at::full({m, n}, 1.0f);
      MatrixProductInto(product, left, right, /*accumulate=*/true);
      EXPECT_TRUE(at::allclose(product.to(at::kDouble), expected + 1, 1e-5, 3e-4));
      MatrixProductInto(product, left, right);
      EXPECT_TRUE(at::allclose(product.to(at::kDouble), expected, 1e-5, 3e-4));
    }
  }
}

// The left factor may have rows of twice its width, as a gradient that overwrote float32 logits.
TEST_P(MatrixProductTest, AGpuAddsBfloat16FactorsToAFloat32Product) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no usable GPU";
  const auto [m, n, k] = GetParam();
  const at::Tensor wide = at::randn({k, 2 * m}).to(at::kCUDA, at::kBFloat16);
  const at::Tensor b = at::randn({k, n}).to(at::kCUDA, at::kBFloat16);
  const at::Tensor a = wide.narrow(1, 0, m).t();
  const at::Tensor expected = at::mm(a.cpu().to(at::kDouble), b.cpu().to(at::kDouble));
  const at::Tensor all = at::full({m + 2, n}, 1.0f, at::kCUDA);
  const at::Tensor product = all.narrow(0, 1, m);  // some rows of a larger gradient
  const void* const memory = product.const_data_ptr();
  MatrixProductInto(product, a, b, /*accumulate=*/true);
  MatrixProductInto(product, a, b, /*accumulate=*/true);
  EXPECT_EQ(product.const_data_ptr(), memory);
  EXPECT_TRUE(at::allclose(product.cpu().to(at::kDouble), 2 * expected + 1, 1e-5, 1e-3));
  MatrixProductInto(product, a, b);
  EXPECT_TRUE(at::allclose(product.cpu().to(at::kDouble), expected, 1e-5, 1e-3));
  EXPECT_TRUE(at::equal(all[0].cpu(), at::ones({n})) && at::equal(all[m + 1].cpu(), at::ones({n})));
}

// Exceptions of the threads become a status where an engine catches them.
TEST(MatrixProductMemoryTest, AProductWithoutMemoryIsResourceExhausted) {
  kernels::CpuKernels table = kernels::GetCpuKernels();
  table.float_product = {.name = "none", .multiply = [](const kernels::ProductArgs<float>&) {
                           throw std::bad_alloc();
                         }};
  kernels::UseCpuKernels(&table);
  const absl::Status status = CatchTorchErrors("a product", [] {
    MatrixProduct(at::ones({600, 600}), at::ones({600, 600}));
    return absl::OkStatus();
  });
  kernels::UseCpuKernels(nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST_P(MatrixProductTest, BitsDoNotDependOnTheNumberOfThreads) {
  const auto [m, n, k] = GetParam();
  const at::Tensor a = at::randn({m, k}).requires_grad_(), b = at::randn({k, n});
  at::set_num_threads(1);
  const at::Tensor one = MatrixProduct(a, b);
  for (const int threads : {2, 3, 8}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(MatrixProduct(a, b), one)) << threads;
  }
}

}  // namespace
}  // namespace tandem::ops
