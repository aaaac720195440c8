#include "common/kernels/cpu/product_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

constexpr float kBefore = 0.5f;

uint16_t Upper(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

void From(float value, float& number) { number = value; }
void From(float value, uint16_t& number) { number = Upper(value); }

double ToDouble(float number) { return number; }
double ToDouble(uint16_t number) {
  const uint32_t bits = uint32_t{number} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A factor [rows, columns].
template <typename Number>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, bool transposed, uint32_t seed)
      : rows_(rows),
        columns_(columns),
        transposed_(transposed),
        numbers_(static_cast<size_t>(rows * columns)) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (Number& number : numbers_) From(normal(generator), number);
  }

  const Number* data() const { return numbers_.data(); }
  int64_t row_stride() const { return transposed_ ? 1 : columns_; }
  int64_t column_stride() const { return transposed_ ? rows_ : 1; }
  double at(int64_t row, int64_t column) const { return ToDouble(numbers_[Index(row, column)]); }
  void Set(int64_t row, int64_t column, float value) { From(value, numbers_[Index(row, column)]); }

 private:
  size_t Index(int64_t row, int64_t column) const {
    return static_cast<size_t>(row * row_stride() + column * column_stride());
  }

  int64_t rows_, columns_;
  bool transposed_;
  std::vector<Number> numbers_;
};

struct Avx512 {
  using Number = float;
  static FloatProduct Find() { return FindFloatProduct("avx512"); }
};
struct Amx {
  using Number = uint16_t;
  static Bfloat16Product Find() { return FindBfloat16Product("amx"); }
};
struct Avx512Bfloat16 {
  using Number = uint16_t;
  static Bfloat16Product Find() { return FindBfloat16Product("avx512_bf16"); }
};

template <typename Kernel>
class ProductKernelsTest : public testing::Test {
 protected:
  using Factor = Matrix<typename Kernel::Number>;

  void SetUp() override {
    if (multiply_ == nullptr) GTEST_SKIP() << "this CPU has no such instructions";
  }

  // [m, n]
  Floats Multiply(const Factor& a, const Factor& b, int64_t m, int64_t n, int64_t k,
                  bool accumulate = false) const {
    Floats product(static_cast<size_t>(m * n), kBefore);
    multiply_({a.data(), a.row_stride(), a.column_stride(), b.data(), b.row_stride(),
               b.column_stride(), product.data(), n, m, n, k, accumulate});
    return product;
  }

  // Of at most 2,100 rounded additions.
  void CheckAgainstDouble(bool a_transposed, bool b_transposed, bool accumulate) const {
    for (const auto& [m, n, k] :
         {std::tuple{1, 1, 1}, {33, 50, 1024}, {70, 100, 40}, {16, 16, 32}, {300, 37, 2100}}) {
      const Factor a(m, k, a_transposed, 1), b(k, n, b_transposed, 2);
      const Floats product = Multiply(a, b, m, n, k, accumulate);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double expected = accumulate ? kBefore : 0, magnitude = std::abs(expected);
          for (int64_t l = 0; l < k; ++l) {
            expected += a.at(i, l) * b.at(l, j);
            magnitude += std::abs(a.at(i, l) * b.at(l, j));
          }
          ASSERT_NEAR(product[static_cast<size_t>(i * n + j)], expected, 4e-7 * magnitude)
              << m << " x " << n << " x " << k << " at " << i << ", " << j;
        }
      }
    }
  }

  const decltype(Kernel::Find()) multiply_ = Kernel::Find();
};

class KernelNames {
 public:
  template <typename Kernel>
  static std::string GetName(int) {
    if (std::is_same_v<Kernel, Avx512>) return "Avx512";
    return std::is_same_v<Kernel, Amx> ? "Amx" : "Avx512Bfloat16";
  }
};
using AllKernels = testing::Types<Avx512, Amx, Avx512Bfloat16>;
TYPED_TEST_SUITE(ProductKernelsTest, AllKernels, KernelNames);

TYPED_TEST(ProductKernelsTest, MatchesDouble) {
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << a_transposed << b_transposed << accumulate);
        this->CheckAgainstDouble(a_transposed, b_transposed, accumulate);
      }
    }
  }
}

TYPED_TEST(ProductKernelsTest, BitsOfAnEntryDependOnItsRowAndColumnAlone) {
  const int64_t m = 100, n = 70, k = 600;
  const typename TestFixture::Factor a(m, k, false, 1), b(k, n, false, 2);
  const Floats all = this->Multiply(a, b, m, n, k);
  for (const int64_t rows : {1, 17, 64}) {
    const Floats some = this->Multiply(a, b, rows, n, k);
    EXPECT_EQ(some, Floats(all.begin(), all.begin() + rows * n)) << rows;
  }
}

TYPED_TEST(ProductKernelsTest, WhatIsNotFiniteStaysSo) {
  typename TestFixture::Factor a(3, 40, false, 1);
  const typename TestFixture::Factor b(40, 3, false, 2);
  a.Set(0, 7, std::numeric_limits<float>::infinity());
  a.Set(1, 39, std::numeric_limits<float>::quiet_NaN());
  const Floats product = this->Multiply(a, b, 3, 3, 40);
  for (size_t i = 0; i < product.size(); ++i) EXPECT_EQ(std::isfinite(product[i]), i >= 6) << i;
}

TYPED_TEST(ProductKernelsTest, ASumOfNothingIsZero) {
  const typename TestFixture::Factor a(2, 1, false, 1), b(1, 3, false, 2);
  EXPECT_EQ(this->Multiply(a, b, 2, 3, 0), Floats(6, 0.0f));
  EXPECT_EQ(this->Multiply(a, b, 2, 3, 0, /*accumulate=*/true), Floats(6, kBefore));
}

}  // namespace
}  // namespace tandem::kernels
