// The product kernels against float64, and what happens without memory.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

// The value of every entry of a product before it is computed.
constexpr float kBefore = 0.5f;

// Returns `value` as a bf16 number, without rounding.
uint16_t TruncatedToBfloat16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

void From(float value, float& number) { number = value; }
void From(float value, uint16_t& number) { number = TruncatedToBfloat16(value); }

double ToDouble(float number) { return number; }
double ToDouble(uint16_t number) {
  const uint32_t bits = uint32_t{number} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A factor [rows, columns] with random numbers.
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

// One struct per kernel: the features that it is chosen for, and whether a CPU has them.
struct Avx512 {
  static constexpr char kName[] = "avx512";
  static ProductKernel<float> Find() { return ChooseCpuKernels({.avx512 = true}).float_product; }
  static bool IsIn(const CpuFeatures& cpu) { return cpu.avx512; }
};
struct Amx {
  static constexpr char kName[] = "amx";
  static ProductKernel<uint16_t> Find() {
    return ChooseCpuKernels({.avx512 = true, .amx = true}).bfloat16_product;
  }
  static bool IsIn(const CpuFeatures& cpu) { return cpu.avx512 && cpu.amx; }
};
struct Avx512Bfloat16 {
  static constexpr char kName[] = "avx512_bf16";
  static ProductKernel<uint16_t> Find() {
    return ChooseCpuKernels({.avx512 = true, .avx512_bf16 = true}).bfloat16_product;
  }
  static bool IsIn(const CpuFeatures& cpu) { return cpu.avx512 && cpu.avx512_bf16; }
};

template <typename Number>
Number NumberOf(const ProductKernel<Number>&);

template <typename Kernel>
class ProductKernelsTest : public testing::Test {
 protected:
  using Factor = Matrix<decltype(NumberOf(Kernel::Find()))>;

  void SetUp() override {
    if (!Kernel::IsIn(DetectCpuFeatures())) GTEST_SKIP() << "this CPU has no " << Kernel::kName;
    ASSERT_STREQ(kernel_.name, Kernel::kName);
  }

  // [m, n]
  Floats Multiply(const Factor& a, const Factor& b, int64_t m, int64_t n, int64_t k,
                  bool accumulate = false) const {
    Floats product(static_cast<size_t>(m * n), kBefore);
    kernel_.multiply({a.data(), a.row_stride(), a.column_stride(), b.data(), b.row_stride(),
                      b.column_stride(), product.data(), n, m, n, k, accumulate});
    return product;
  }

  // The tolerance is that of at most 2,100 rounded additions.
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

  const decltype(Kernel::Find()) kernel_ = Kernel::Find();
};

class KernelNames {
 public:
  template <typename Kernel>
  static std::string GetName(int) {
    return Kernel::kName;
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

TYPED_TEST(ProductKernelsTest, InfinitiesAndNansReachTheirRows) {
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

// Refuses memory beyond what the process has, and takes what its allocator keeps free.
void LimitMemoryToNow() {
  long pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld", &pages) != 1) std::_Exit(3);
  std::fclose(file);
  const auto bytes = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE));
  const rlimit limit = {.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(4);
  for (size_t size = size_t{1} << 26; size >= 1024;) {
    void* volatile kept = std::malloc(size);
    if (kept == nullptr) size /= 2;
  }
}

void AllowMemory() {
  const rlimit limit = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(5);
}

TYPED_TEST(ProductKernelsTest, WithoutMemoryItThrowsAndCanBeCalledAgain) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer's allocator ends the process instead";
#endif
  GTEST_FLAG_SET(death_test_style, "fast");
  const int64_t size = 700;
  const typename TestFixture::Factor a(size, size, false, 1), b(size, size, false, 2);
  Floats product(static_cast<size_t>(size * size));
  const auto multiply = [&] {
    this->kernel_.multiply({a.data(), a.row_stride(), a.column_stride(), b.data(), b.row_stride(),
                            b.column_stride(), product.data(), size, size, size, size, false});
  };
  EXPECT_EXIT(
      {
        LimitMemoryToNow();
        bool thrown = false;
        try {
          multiply();
        } catch (const std::bad_alloc&) {
          thrown = true;
        }
        AllowMemory();
        if (!thrown) std::_Exit(1);
        multiply();
        std::_Exit(product == this->Multiply(a, b, size, size, size) ? 0 : 2);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tandem::kernels
