#include "common/kernels/cpu/amx_product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

constexpr float kBefore = 0.5f;

// A factor [rows, columns] as both types.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, bool transposed, bool bfloat16, uint32_t seed)
      : rows_(rows), columns_(columns), transposed_(transposed), bfloat16_(bfloat16) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i) {
      uint32_t bits = 0;
      const float value = normal(generator);
      std::memcpy(&bits, &value, sizeof(bits));
      halves_.push_back(static_cast<uint16_t>(bits >> 16));
      if (bfloat16) bits &= 0xffff0000;
      std::memcpy(&values_.emplace_back(), &bits, sizeof(bits));
    }
  }

  const void* data() const {
    return bfloat16_ ? static_cast<const void*>(halves_.data()) : values_.data();
  }
  int64_t row_stride() const { return transposed_ ? 1 : columns_; }
  int64_t column_stride() const { return transposed_ ? rows_ : 1; }
  float& at(int64_t row, int64_t column) {
    return values_[static_cast<size_t>(row * row_stride() + column * column_stride())];
  }

 private:
  int64_t rows_, columns_;
  bool transposed_, bfloat16_;
  Floats values_;
  std::vector<uint16_t> halves_;
};

class AmxProductTest : public testing::Test {
 protected:
  void SetUp() override {
    if (multiply_ == nullptr) GTEST_SKIP() << "this CPU has no AMX";
  }

  // [m, n]
  Floats Multiply(const Matrix& a, const Matrix& b, bool bfloat16, int64_t m, int64_t n, int64_t k,
                  bool accumulate = false) const {
    Floats product(static_cast<size_t>(m * n), kBefore);
    multiply_({a.data(), a.row_stride(), a.column_stride(), b.data(), b.row_stride(),
               b.column_stride(), bfloat16, product.data(), n, m, n, k, accumulate});
    return product;
  }

  const AmxProduct multiply_ = FindAmxProduct();
};

// Factors as they lie in memory and transposed, of either type, added or not.
class AmxLayoutTest : public AmxProductTest,
                      public testing::WithParamInterface<std::tuple<bool, bool, bool, bool>> {};

INSTANTIATE_TEST_SUITE_P(All, AmxLayoutTest,
                         testing::Combine(testing::Bool(), testing::Bool(), testing::Bool(),
                                          testing::Bool()));

// Of at most 2,100 rounded additions, and as much as one is what the products leave out.
TEST_P(AmxLayoutTest, MatchesDouble) {
  const auto [a_transposed, b_transposed, bfloat16, accumulate] = GetParam();
  for (const auto& [m, n, k] :
       {std::tuple{1, 1, 1}, {33, 50, 1024}, {70, 100, 40}, {16, 16, 32}, {300, 37, 2100}}) {
    Matrix a(m, k, a_transposed, bfloat16, 1), b(k, n, b_transposed, bfloat16, 2);
    const Floats product = Multiply(a, b, bfloat16, m, n, k, accumulate);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double expected = accumulate ? kBefore : 0, magnitude = std::abs(expected);
        for (int64_t l = 0; l < k; ++l) {
          expected += double{a.at(i, l)} * b.at(l, j);
          magnitude += std::abs(double{a.at(i, l)} * b.at(l, j));
        }
        ASSERT_NEAR(product[static_cast<size_t>(i * n + j)], expected, 1.5e-7 * magnitude)
            << m << " x " << n << " x " << k << " at " << i << ", " << j;
      }
    }
  }
}

TEST_F(AmxProductTest, BitsOfAnEntryDependOnItsRowAndColumnAlone) {
  const int64_t m = 100, n = 70, k = 600;
  for (const bool bfloat16 : {false, true}) {
    const Matrix a(m, k, false, bfloat16, 1), b(k, n, false, bfloat16, 2);
    const Floats all = Multiply(a, b, bfloat16, m, n, k);
    for (const int64_t rows : {1, 17, 64}) {
      const Floats some = Multiply(a, b, bfloat16, rows, n, k);
      EXPECT_EQ(some, Floats(all.begin(), all.begin() + rows * n)) << rows;
    }
  }
}

TEST_F(AmxProductTest, NoBitOfAFloat32FactorIsLost) {
  Matrix a(1, 1, false, false, 1), b(1, 1, false, false, 2);
  for (const float x : {16777215.0f, 8388609.0f, 1.1f, -3.3333333f}) {
    a.at(0, 0) = x;
    b.at(0, 0) = 1.0f;
    EXPECT_EQ(Multiply(a, b, false, 1, 1, 1)[0], x);
    EXPECT_EQ(Multiply(b, a, false, 1, 1, 1)[0], x);
  }
}

TEST_F(AmxProductTest, WhatIsNotFiniteStaysSo) {
  Matrix a(3, 40, false, false, 1), b(40, 3, false, false, 2);
  a.at(0, 7) = std::numeric_limits<float>::infinity();
  a.at(1, 39) = std::numeric_limits<float>::quiet_NaN();
  const Floats product = Multiply(a, b, false, 3, 3, 40);
  for (size_t i = 0; i < product.size(); ++i) EXPECT_EQ(std::isfinite(product[i]), i >= 6) << i;
}

TEST_F(AmxProductTest, ASumOfNothingIsZero) {
  const Matrix a(2, 1, false, false, 1), b(1, 3, false, false, 2);
  EXPECT_EQ(Multiply(a, b, false, 2, 3, 0), Floats(6, 0.0f));
  EXPECT_EQ(Multiply(a, b, false, 2, 3, 0, /*accumulate=*/true), Floats(6, kBefore));
}

}  // namespace
}  // namespace tandem::kernels
