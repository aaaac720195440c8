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

// A factor [rows, columns] of bf16 numbers.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, bool transposed, uint32_t seed)
      : rows_(rows), columns_(columns), transposed_(transposed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i) halves_.push_back(Upper(normal(generator)));
  }

  const uint16_t* data() const { return halves_.data(); }
  int64_t row_stride() const { return transposed_ ? 1 : columns_; }
  int64_t column_stride() const { return transposed_ ? rows_ : 1; }
  double at(int64_t row, int64_t column) const {
    const uint32_t bits = uint32_t{halves_[Index(row, column)]} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  void Set(int64_t row, int64_t column, float value) { halves_[Index(row, column)] = Upper(value); }

 private:
  static uint16_t Upper(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
  }
  size_t Index(int64_t row, int64_t column) const {
    return static_cast<size_t>(row * row_stride() + column * column_stride());
  }

  int64_t rows_, columns_;
  bool transposed_;
  std::vector<uint16_t> halves_;
};

class AmxProductTest : public testing::Test {
 protected:
  void SetUp() override {
    if (multiply_ == nullptr) GTEST_SKIP() << "this CPU has no AMX";
  }

  // [m, n]
  Floats Multiply(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t k,
                  bool accumulate = false) const {
    Floats product(static_cast<size_t>(m * n), kBefore);
    multiply_({a.data(), a.row_stride(), a.column_stride(), b.data(), b.row_stride(),
               b.column_stride(), product.data(), n, m, n, k, accumulate});
    return product;
  }

  const AmxProduct multiply_ = FindAmxProduct();
};

// Factors as they lie in memory and transposed, added or not.
class AmxLayoutTest : public AmxProductTest,
                      public testing::WithParamInterface<std::tuple<bool, bool, bool>> {};

INSTANTIATE_TEST_SUITE_P(All, AmxLayoutTest,
                         testing::Combine(testing::Bool(), testing::Bool(), testing::Bool()));

// Of at most 2,100 rounded additions.
TEST_P(AmxLayoutTest, MatchesDouble) {
  const auto [a_transposed, b_transposed, accumulate] = GetParam();
  for (const auto& [m, n, k] :
       {std::tuple{1, 1, 1}, {33, 50, 1024}, {70, 100, 40}, {16, 16, 32}, {300, 37, 2100}}) {
    const Matrix a(m, k, a_transposed, 1), b(k, n, b_transposed, 2);
    const Floats product = Multiply(a, b, m, n, k, accumulate);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double expected = accumulate ? kBefore : 0, magnitude = std::abs(expected);
        for (int64_t l = 0; l < k; ++l) {
          expected += a.at(i, l) * b.at(l, j);
          magnitude += std::abs(a.at(i, l) * b.at(l, j));
        }
        ASSERT_NEAR(product[static_cast<size_t>(i * n + j)], expected, 1.5e-7 * magnitude)
            << m << " x " << n << " x " << k << " at " << i << ", " << j;
      }
    }
  }
}

TEST_F(AmxProductTest, BitsOfAnEntryDependOnItsRowAndColumnAlone) {
  const int64_t m = 100, n = 70, k = 600;
  const Matrix a(m, k, false, 1), b(k, n, false, 2);
  const Floats all = Multiply(a, b, m, n, k);
  for (const int64_t rows : {1, 17, 64}) {
    const Floats some = Multiply(a, b, rows, n, k);
    EXPECT_EQ(some, Floats(all.begin(), all.begin() + rows * n)) << rows;
  }
}

TEST_F(AmxProductTest, WhatIsNotFiniteStaysSo) {
  Matrix a(3, 40, false, 1);
  const Matrix b(40, 3, false, 2);
  a.Set(0, 7, std::numeric_limits<float>::infinity());
  a.Set(1, 39, std::numeric_limits<float>::quiet_NaN());
  const Floats product = Multiply(a, b, 3, 3, 40);
  for (size_t i = 0; i < product.size(); ++i) EXPECT_EQ(std::isfinite(product[i]), i >= 6) << i;
}

TEST_F(AmxProductTest, ASumOfNothingIsZero) {
  const Matrix a(2, 1, false, 1), b(1, 3, false, 2);
  EXPECT_EQ(Multiply(a, b, 2, 3, 0), Floats(6, 0.0f));
  EXPECT_EQ(Multiply(a, b, 2, 3, 0, /*accumulate=*/true), Floats(6, kBefore));
}

}  // namespace
}  // namespace tandem::kernels
