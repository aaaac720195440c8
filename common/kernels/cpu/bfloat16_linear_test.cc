// Linear maps of bf16 on every instruction set of this CPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/kernels/cpu/packed_weight.h"

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;

int64_t Even(int64_t in) { return in + in % 2; }

float Wide(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

uint16_t Narrow(float value) {
  float rounded = 0;
  RoundToBfloat16(&value, 1, &rounded);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded) >> 16);
}

// The numbers that the tests multiply.
enum class Values {
  kNormal,     // around 1
  kSubnormal,  // whose products, and some of which, are around 2^-126
};

float Random(std::mt19937& generator, Values values) {
  if (values == Values::kNormal) return std::normal_distribution<float>()(generator);
  const int exponent = std::uniform_int_distribution(-70, -56)(generator);
  const float value = std::ldexp(std::normal_distribution<float>()(generator), exponent);
  return generator() % 8 == 0 ? std::ldexp(value, -64) : value;
}

// A map, its rows and its outputs of float32. `add` is added to.
struct Problem {
  Problem(int64_t rows, int64_t in, int64_t out, Values values = Values::kNormal)
      : rows(rows), in(in), out(out), stride(Even(in)) {
    std::mt19937 generator(static_cast<uint32_t>(rows * 7 + in * 3 + out));
    x.resize(static_cast<size_t>(rows * stride));
    w.resize(static_cast<size_t>(out * stride));
    for (auto* matrix : {&x, &w}) {
      for (size_t i = 0; i < matrix->size(); ++i) {
        const bool padding = static_cast<int64_t>(i) % stride >= in;
        (*matrix)[i] = padding ? 0 : Narrow(Random(generator, values));
      }
    }
    for (int64_t o = 0; o < out; ++o) bias.push_back(Random(generator, values));
    for (int64_t i = 0; i < rows * out; ++i) add.push_back(Random(generator, values));
    const int64_t bytes = PackedBytes(WeightFormat::kBfloat16, out, in);
    packed.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    std::fill_n(static_cast<char*>(packed.get()), bytes, 0);
    Floats wide(w.size());
    for (size_t i = 0; i < w.size(); ++i) wide[i] = Wide(w[i]);
    PackRows({WeightFormat::kBfloat16, packed.get(), out, in}, 0, out, wide.data(), stride);
  }

  // The definition in cpu_kernels.h, number by number.
  float Expected(int64_t row, int64_t o) const {
    float sum = 0;
    for (int64_t k = 0; k < stride; k += 2) {
      for (const int64_t j : {k + 1, k}) {
        sum = Flushed(
            std::fma(Flushed(Wide(x[row * stride + j])), Flushed(Wide(w[o * stride + j])), sum));
      }
    }
    sum = Flushed(sum + Flushed(bias[o]));
    return Flushed(Flushed(add[row * out + o]) + sum);
  }

  void RunPacked(const CpuKernels& kernels, int64_t row, int64_t count, int64_t panel,
                 int64_t panel_end, Floats& y) const {
    kernels.bfloat16_packed_linear({x.data() + row * stride, stride, WeightFormat::kBfloat16,
                                    packed.get(), bias.data(), &y[row * out], out, count, in, out,
                                    panel, panel_end, true});
  }
  void RunDense(const CpuKernels& kernels, int64_t row, int64_t count, int64_t o, int64_t end,
                Floats& y) const {
    kernels.bfloat16_linear({x.data() + row * stride, stride, w.data(), bias.data(), &y[row * out],
                             out, count, stride, o, end, true});
  }

  static float Flushed(float value) {
    return std::abs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
  }

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  int64_t rows, in, out, stride;
  Halves x, w;
  Floats bias, add;
  std::unique_ptr<void, Free> packed;
};

// Sizes on both sides of every tile, panel, pair, block of inputs and block of rows.
struct Size {
  int64_t rows, in, out;
};
constexpr Size kSizes[] = {{1, 1, 1},     {1, 40, 150},   {2, 64, 33},   {3, 75, 16},
                           {4, 7, 70},    {5, 300, 17},   {6, 257, 40},  {7, 64, 130},
                           {12, 31, 15},  {13, 600, 31},  {33, 66, 40},  {65, 33, 48},
                           {40, 514, 20}, {200, 260, 20}, {90, 3000, 17}};

class Bfloat16LinearTest : public testing::TestWithParam<CpuFeatures> {
 protected:
  void SetUp() override {
    const CpuFeatures cpu = DetectCpuFeatures();
    if ((GetParam().avx2 && !cpu.avx2) || (GetParam().avx512 && !cpu.avx512) ||
        (GetParam().avx512_bf16 && !cpu.avx512_bf16)) {
      GTEST_SKIP() << "this CPU has other instructions";
    }
  }
  bool HasFma() const { return GetParam().avx2; }

  const CpuKernels kernels_ = ChooseCpuKernels(GetParam());
};

INSTANTIATE_TEST_SUITE_P(InstructionSet, Bfloat16LinearTest,
                         testing::Values(CpuFeatures{}, CpuFeatures{.avx2 = true},
                                         CpuFeatures{.avx2 = true, .avx512 = true},
                                         CpuFeatures{
                                             .avx2 = true, .avx512 = true, .avx512_bf16 = true}),
                         [](const auto& info) {
                           return info.param.avx512_bf16
                                      ? "avx512_bf16"
                                      : std::string(ChooseCpuKernels(info.param).name);
                         });

// Products of two bf16 are exact; the tolerance is that of a chain of 3,000 rounded additions.
TEST_P(Bfloat16LinearTest, MatchesDouble) {
  for (const Size& size : kSizes) {
    const Problem problem(size.rows, size.in, size.out);
    Floats y = problem.add;
    problem.RunPacked(kernels_, 0, size.rows, 0, PanelCount(size.out), y);
    for (int64_t r = 0; r < size.rows; ++r) {
      for (int64_t o = 0; o < size.out; ++o) {
        const size_t i = r * size.out + o;
        double expected = double{problem.add[i]} + problem.bias[o], magnitude = std::abs(expected);
        for (int64_t k = 0; k < size.in; ++k) {
          const double term = double{Wide(problem.x[r * problem.stride + k])} *
                              Wide(problem.w[o * problem.stride + k]);
          expected += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(y[i], expected, 1e-6 * magnitude)
            << size.rows << " x " << size.in << " x " << size.out << " at " << r << ", " << o;
      }
    }
  }
}

TEST_P(Bfloat16LinearTest, HasTheBitsOfItsDefinition) {
  if (!HasFma()) GTEST_SKIP() << "without fused multiply-adds sums are rounded twice";
  for (const Values values : {Values::kNormal, Values::kSubnormal}) {
    for (const Size& size : kSizes) {
      const Problem problem(size.rows, size.in, size.out, values);
      Floats packed = problem.add, dense = problem.add, expected(problem.add.size());
      problem.RunPacked(kernels_, 0, size.rows, 0, PanelCount(size.out), packed);
      problem.RunDense(kernels_, 0, size.rows, 0, size.out, dense);
      for (int64_t r = 0; r < size.rows; ++r) {
        for (int64_t o = 0; o < size.out; ++o) {
          expected[r * size.out + o] = problem.Expected(r, o);
        }
      }
      EXPECT_EQ(packed, expected) << size.rows << " x " << size.in << " x " << size.out;
      EXPECT_EQ(dense, expected) << size.rows << " x " << size.in << " x " << size.out;
    }
  }
}

TEST_P(Bfloat16LinearTest, RowsAndOutputsDoNotDependOnTheSplit) {
  for (const Size& size : kSizes) {
    const Problem problem(size.rows, size.in, size.out);
    Floats whole = problem.add, packed = whole, dense = whole;
    const int64_t panels = PanelCount(size.out);
    problem.RunPacked(kernels_, 0, size.rows, 0, panels, whole);
    for (int64_t row = 0, count = 1; row < size.rows; row += count, count = count % 7 + 1) {
      count = std::min(count, size.rows - row);
      for (int64_t panel = 0, step = 1; panel < panels; panel += step, step = step % 3 + 1) {
        problem.RunPacked(kernels_, row, count, panel, std::min(panel + step, panels), packed);
      }
      for (int64_t o = 0, step = 1; o < size.out; o += step, step = step % 23 + 5) {
        problem.RunDense(kernels_, row, count, o, std::min(o + step, size.out), dense);
      }
    }
    EXPECT_EQ(packed, whole) << size.rows << " x " << size.in << " x " << size.out;
    EXPECT_EQ(dense, whole) << size.rows << " x " << size.in << " x " << size.out;
  }
}

// Other operations of the thread keep their subnormal numbers.
TEST_P(Bfloat16LinearTest, LeavesTheThreadAsItWas) {
  const Problem problem(13, 600, 31, Values::kSubnormal);
  Floats y = problem.add;
  problem.RunPacked(kernels_, 0, 13, 0, 2, y);
  volatile float small = std::numeric_limits<float>::min();
  EXPECT_GT(small / 4, 0.0f);
}

TEST_P(Bfloat16LinearTest, RoundsRowsAsWeightsAre) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t width : {1, 15, 16, 33, 70}) {
    const int64_t rows = 3, x_stride = width + 2, y_stride = Even(width) + 2;
    std::mt19937 generator(static_cast<uint32_t>(width));
    Floats x(static_cast<size_t>(rows * x_stride));
    for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(generator()));
    x[0] = 1 + 1.0f / 256;  // ties
    x[x_stride] = -1 - 3.0f / 256;
    x[2 * x_stride] = std::numeric_limits<float>::quiet_NaN();
    if (width > 1) x[1] = kInfinity, x[x_stride + 1] = std::numeric_limits<float>::max();
    Halves y(static_cast<size_t>(rows * y_stride), 7), expected = y;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; ++i) expected[r * y_stride + i] = Narrow(x[r * x_stride + i]);
      if (width % 2 != 0) expected[r * y_stride + width] = 0;
    }
    kernels_.rounded_rows({x.data(), x_stride, y.data(), y_stride, rows, width});
    EXPECT_EQ(y, expected) << width;
  }
}

}  // namespace
}  // namespace tandem::kernels
