// Packed weights and the kernels of linear maps, packed and dense, on every instruction set of this
// CPU.
#include "common/kernels/cpu/packed_weight.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/kernels/cpu/cpu_kernels.h"

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kBfloat16,
                                     WeightFormat::kInt8, WeightFormat::kInt4};

Floats RandomFloats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// A packed matrix and its memory.
class Packed {
 public:
  Packed(WeightFormat format, int64_t out, int64_t in)
      : memory_(std::aligned_alloc(64, (PackedBytes(format, out, in) + 64) / 64 * 64), std::free),
        matrix_{.format = format, .data = memory_.get(), .out = out, .in = in} {
    std::memset(memory_.get(), 0, PackedBytes(format, out, in));
  }
  Packed(WeightFormat format, int64_t out, int64_t in, const Floats& values)
      : Packed(format, out, in) {
    PackRows(matrix_, 0, out, values.data(), in);
  }

  const PackedMatrix& matrix() const { return matrix_; }
  // [out, in]
  Floats Unpacked() const {
    Floats values(static_cast<size_t>(matrix_.out * matrix_.in));
    for (int64_t o = 0; o < matrix_.out; ++o) UnpackRow(matrix_, o, &values[o * matrix_.in]);
    return values;
  }
  std::string Bytes() const {
    const auto size = PackedBytes(matrix_.format, matrix_.out, matrix_.in);
    return {static_cast<const char*>(matrix_.data), static_cast<size_t>(size)};
  }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_;
  PackedMatrix matrix_;
};

TEST(PackedWeightTest, Float32AndBfloat16KeepTheirValues) {
  const int64_t out = 19, in = 37;
  Floats values = RandomFloats(out * in, 1);
  EXPECT_EQ(Packed(WeightFormat::kFloat32, out, in, values).Unpacked(), values);
  const Floats rounded = Packed(WeightFormat::kBfloat16, out, in, values).Unpacked();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::abs(rounded[i] - values[i]), std::abs(values[i]) / 256) << i;
  }
  EXPECT_EQ(Packed(WeightFormat::kBfloat16, out, in, rounded).Unpacked(), rounded);
}

TEST(PackedWeightTest, Bfloat16RoundsTiesToEven) {
  const Floats values = {1 + 1.0f / 256, 1 + 3.0f / 256, -1 - 1.0f / 256, 1 + 1.01f / 256};
  EXPECT_EQ(Packed(WeightFormat::kBfloat16, 1, 4, values).Unpacked(),
            (Floats{1, 1 + 1.0f / 64, -1, 1 + 1.0f / 128}));
}

TEST(PackedWeightTest, QuantisedWeightsMoveByHalfAScale) {
  const int64_t out = 19, in = 70;
  const Floats values = RandomFloats(out * in, 2);
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    const bool bytes = format == WeightFormat::kInt8;
    const Floats quantised = Packed(format, out, in, values).Unpacked();
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t begin = 0; begin < in; begin += kGroupInputs) {
        const int64_t end = std::min(in, begin + kGroupInputs);
        float extreme = 0;
        for (int64_t k = begin; k < end; ++k) {
          const float value = values[o * in + k];
          if (std::abs(value) > std::abs(extreme)) extreme = value;
        }
        // A scale is rounded to 8 bits.
        const float scale = std::abs(extreme) / (bytes ? 127.0f : 8.0f) * (1 + 1.0f / 256);
        for (int64_t k = begin; k < end; ++k) {
          const float value = values[o * in + k];
          const bool far_end = !bytes && value / extreme < -7.0f / 8;
          EXPECT_LE(std::abs(quantised[o * in + k] - value), (far_end ? 1.04f : 0.51f) * scale)
              << o << " " << k;
        }
      }
    }
  }
}

TEST(PackedWeightTest, AGroupOfZerosIsZeroAndOneWithANanIsNan) {
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    Floats values(64, 0.0f);
    values[40] = std::numeric_limits<float>::infinity();
    const Floats unpacked = Packed(format, 1, 64, values).Unpacked();
    for (size_t i = 0; i < values.size(); ++i) {
      if (i < 32) {
        EXPECT_EQ(unpacked[i], 0) << i;
      } else {
        EXPECT_TRUE(std::isnan(unpacked[i])) << i;
      }
    }
  }
}

TEST(PackedWeightTest, RowsPackedInPartsHaveTheBytesOfTheWhole) {
  const int64_t out = 45, in = 33;
  const Floats values = RandomFloats(out * in, 3);
  for (const WeightFormat format : kFormats) {
    const Packed whole(format, out, in, values), parts(format, out, in);
    for (const auto& [first, end] :
         {std::pair<int64_t, int64_t>{20, 45}, {0, 7}, {7, 18}, {18, 20}}) {
      PackRows(parts.matrix(), first, end - first, &values[first * in], in);
    }
    EXPECT_EQ(parts.Bytes(), whole.Bytes());
  }
}

TEST(PackedWeightTest, RowsOfBfloat16NumbersHaveTheBytesOfTheirValues) {
  for (const int64_t in : {1, 32, 33, 131}) {
    const int64_t out = 45;
    Floats values = RandomFloats(out * in, 3);
    RoundToBfloat16(values.data(), out * in, values.data());
    std::vector<uint16_t> numbers;
    for (const float value : values) {
      numbers.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    }
    const Packed of_values(WeightFormat::kBfloat16, out, in, values);
    const Packed of_numbers(WeightFormat::kBfloat16, out, in);
    for (const auto& [first, end] : {std::pair<int64_t, int64_t>{18, 45}, {0, 18}}) {
      PackBfloat16Rows(of_numbers.matrix(), first, end - first, &numbers[first * in], in);
    }
    EXPECT_EQ(of_numbers.Bytes(), of_values.Bytes()) << in;
  }
}

// The bytes are a file format of their own: they do not depend on the program that wrote them.
TEST(PackedWeightTest, BytesAreThoseOfTheHeader) {
  Floats values(2 * 32, 0.0f);
  values[32] = 8;       // row 1: the scale is -1, and q = -8
  values[32 + 9] = -3;  // q = 3
  const std::string bytes = Packed(WeightFormat::kInt4, 2, 32, values).Bytes();
  ASSERT_EQ(bytes.size(), 288u);
  EXPECT_EQ(bytes.substr(2, 2), "\x80\xbf");
  EXPECT_EQ(bytes.substr(32 + 2, 2), "\x80\x88");               // inputs 0 to 3
  EXPECT_EQ(bytes.substr(32 + 2 * 16 * 2 + 2, 2), "\xb8\x88");  // inputs 8 to 11
}

TEST(PackedWeightTest, OutputsOfAGroupAreInTheOrderOfTheHeader) {
  constexpr int kOrder[] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
  for (size_t i = 0; i < 16; ++i) {
    Floats values(16 * 32, 0.0f);
    values[kOrder[i] * 32 + 3] = 127;  // the scale is 1
    const std::string bytes = Packed(WeightFormat::kInt8, 16, 32, values).Bytes();
    EXPECT_EQ(bytes.substr(2 * i, 2), "\x80\x3f") << i;
    EXPECT_EQ(bytes.substr(32 + 2 * (16 + i), 2), "\x80\xff") << i;  // inputs 2 and 3
  }
}

TEST(PackedWeightTest, ZerosOfANegativeScaleArePositive) {
  const Floats unpacked = Packed(WeightFormat::kInt4, 1, 2, {8.0f, 0.0f}).Unpacked();
  EXPECT_FALSE(std::signbit(unpacked[1]));
}

// Every instruction set that this CPU has.
class LinearKernelTest : public testing::TestWithParam<CpuFeatures> {
 protected:
  void SetUp() override {
    const CpuFeatures cpu = DetectCpuFeatures();
    if ((GetParam().avx2 && !cpu.avx2) || (GetParam().avx512 && !cpu.avx512)) {
      GTEST_SKIP() << "this CPU has no " << kernels_.name;
    }
  }
  bool HasFma() const { return GetParam().avx2; }

  const CpuKernels kernels_ = ChooseCpuKernels(GetParam());
};

INSTANTIATE_TEST_SUITE_P(InstructionSet, LinearKernelTest,
                         testing::Values(CpuFeatures{}, CpuFeatures{.avx2 = true},
                                         CpuFeatures{.avx2 = true, .avx512 = true}),
                         [](const auto& info) {
                           return std::string(ChooseCpuKernels(info.param).name);
                         });

// A product with its weights in one format; `values` are those weights in float32.
struct Problem {
  Problem(WeightFormat format, int64_t rows, int64_t in, int64_t out)
      : rows(rows),
        in(in),
        out(out),
        x(RandomFloats(rows * in, 4)),
        bias(RandomFloats(out, 5)),
        packed(format, out, in, RandomFloats(out * in, 6)),
        values(packed.Unpacked()) {}

  // Returns [rows, out], added to 0.5.
  Floats Run(const CpuKernels& kernels) const {
    Floats y(static_cast<size_t>(rows * out), 0.5f);
    kernels.packed_linear({x.data(), in, packed.matrix().format, packed.matrix().data, bias.data(),
                           y.data(), out, rows, in, out, 0, PanelCount(out), true});
    return y;
  }
  Floats RunDense(const CpuKernels& kernels) const {
    Floats y(static_cast<size_t>(rows * out), 0.5f);
    kernels.linear(
        {x.data(), in, values.data(), bias.data(), y.data(), out, rows, in, 0, out, true});
    return y;
  }

  int64_t rows, in, out;
  Floats x, bias;
  Packed packed;
  Floats values;
};

// Sizes on both sides of every tile, panel, group, block of inputs and block of rows.
struct Size {
  int64_t rows, in, out;
};
constexpr Size kSizes[] = {{1, 1, 1},    {1, 40, 150}, {2, 32, 33},    {3, 75, 16},   {4, 7, 70},
                           {5, 300, 17}, {6, 257, 40}, {7, 64, 130},   {12, 31, 15},  {13, 600, 31},
                           {33, 64, 40}, {65, 33, 48}, {200, 260, 20}, {90, 3000, 17}};

// The tolerance is that of a chain of 3,000 rounded additions.
TEST_P(LinearKernelTest, MatchesDouble) {
  for (const WeightFormat format : kFormats) {
    for (const Size& size : kSizes) {
      const Problem problem(format, size.rows, size.in, size.out);
      const Floats y = problem.Run(kernels_);
      for (int64_t r = 0; r < size.rows; ++r) {
        for (int64_t o = 0; o < size.out; ++o) {
          double expected = 0.5 + problem.bias[o], magnitude = std::abs(expected);
          for (int64_t k = 0; k < size.in; ++k) {
            const double term =
                double{problem.x[r * size.in + k]} * problem.values[o * size.in + k];
            expected += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(y[r * size.out + o], expected, 1e-6 * magnitude)
              << size.rows << " x " << size.in << " x " << size.out << " at " << r << ", " << o;
        }
      }
    }
  }
}

TEST_P(LinearKernelTest, PackedAndDenseHaveTheSameBits) {
  for (const WeightFormat format : kFormats) {
    for (const Size& size : kSizes) {
      const Problem problem(format, size.rows, size.in, size.out);
      EXPECT_EQ(problem.Run(kernels_), problem.RunDense(kernels_))
          << size.rows << " x " << size.in << " x " << size.out;
    }
  }
}

// The smallest and the largest magnitudes that a group can have.
TEST_P(LinearKernelTest, ExtremeScalesAreExact) {
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    for (const float extreme : {0x1p110f, -0x1p110f, 0x1p-124f, -0x1p-124f}) {
      const int64_t in = 32, out = 16;
      Floats weights = RandomFloats(out * in, 7);
      for (float& weight : weights) weight = extreme * std::tanh(weight);
      const Packed packed(format, out, in, weights);
      const Floats values = packed.Unpacked();
      for (int64_t k = 0; k < in; ++k) {  // a product with a row of the identity is a column
        Floats x(static_cast<size_t>(in), 0.0f), y(static_cast<size_t>(out));
        x[k] = 1;
        kernels_.packed_linear({x.data(), in, format, packed.matrix().data, nullptr, y.data(), out,
                                1, in, out, 0, 1, false});
        for (int64_t o = 0; o < out; ++o) EXPECT_EQ(y[o], values[o * in + k]) << o << " " << k;
      }
    }
  }
}

TEST_P(LinearKernelTest, ASumIsOneChainOfFusedMultiplyAdds) {
  if (!HasFma()) GTEST_SKIP() << "without fused multiply-adds sums are rounded twice";
  for (const Size& size : kSizes) {
    const Problem problem(WeightFormat::kInt8, size.rows, size.in, size.out);
    Floats expected(static_cast<size_t>(size.rows * size.out));
    for (int64_t r = 0; r < size.rows; ++r) {
      for (int64_t o = 0; o < size.out; ++o) {
        float sum = 0;
        for (int64_t k = 0; k < size.in; ++k) {
          sum = std::fma(problem.x[r * size.in + k], problem.values[o * size.in + k], sum);
        }
        expected[r * size.out + o] = 0.5f + (sum + problem.bias[o]);
      }
    }
    EXPECT_EQ(problem.Run(kernels_), expected);
  }
}

TEST_P(LinearKernelTest, RowsAndOutputsDoNotDependOnTheSplit) {
  for (const WeightFormat format : kFormats) {
    for (const Size& size : kSizes) {
      const Problem problem(format, size.rows, size.in, size.out);
      const Floats whole = problem.Run(kernels_);
      Floats packed(whole.size(), 0.5f), dense(whole.size(), 0.5f);
      const int64_t panels = PanelCount(size.out);
      for (int64_t row = 0, count = 1; row < size.rows; row += count, count = count % 7 + 1) {
        count = std::min(count, size.rows - row);
        const float* const x = &problem.x[row * size.in];
        for (int64_t panel = 0, step = 1; panel < panels; panel += step, step = step % 3 + 1) {
          kernels_.packed_linear({x, size.in, format, problem.packed.matrix().data,
                                  problem.bias.data(), &packed[row * size.out], size.out, count,
                                  size.in, size.out, panel, std::min(panel + step, panels), true});
        }
        for (int64_t o = 0, step = 1; o < size.out; o += step, step = step % 23 + 5) {
          kernels_.linear({x, size.in, problem.values.data(), problem.bias.data(),
                           &dense[row * size.out], size.out, count, size.in, o,
                           std::min(o + step, size.out), true});
        }
      }
      EXPECT_EQ(packed, whole) << size.rows << " x " << size.in << " x " << size.out;
      EXPECT_EQ(dense, whole) << size.rows << " x " << size.in << " x " << size.out;
    }
  }
}

TEST_P(LinearKernelTest, UnpackedPanelsHaveTheValuesOfTheirRowsInputByInput) {
  constexpr int64_t kPanel = 1, kPanels = 2, kStride = kPanels * kPanelOuts + 3;
  for (const WeightFormat format : kFormats) {
    for (const int64_t in : {1, 7, 8, 40, 96}) {
      const int64_t out = (kPanel + kPanels) * kPanelOuts;
      const Packed packed(format, out, in, RandomFloats(out * in, 3));
      const Floats values = packed.Unpacked();
      Floats to(in * kStride, 0.5f), expected = to;
      for (int64_t k = 0; k < in; ++k) {
        for (int64_t o = 0; o < kPanels * kPanelOuts; ++o) {
          expected[k * kStride + o] = values[(kPanel * kPanelOuts + o) * in + k];
        }
      }
      kernels_.unpack(
          {format, packed.matrix().data, in, kPanel, kPanel + kPanels, to.data(), kStride});
      EXPECT_EQ(to, expected) << static_cast<int>(format) << " " << in;
    }
  }
}

TEST_P(LinearKernelTest, NoRowsAndNoOutputsWriteNothing) {
  const Problem problem(WeightFormat::kBfloat16, 2, 40, 20);
  Floats y(40, 0.25f);
  const void* const w = problem.packed.matrix().data;
  kernels_.packed_linear({problem.x.data(), 40, WeightFormat::kBfloat16, w, nullptr, y.data(), 20,
                          0, 40, 20, 0, 2, false});
  kernels_.packed_linear({problem.x.data(), 40, WeightFormat::kBfloat16, w, nullptr, y.data(), 20,
                          2, 40, 20, 1, 1, false});
  kernels_.linear(
      {problem.x.data(), 40, problem.values.data(), nullptr, y.data(), 20, 0, 40, 0, 20, false});
  kernels_.linear(
      {problem.x.data(), 40, problem.values.data(), nullptr, y.data(), 20, 2, 40, 7, 7, false});
  EXPECT_EQ(y, Floats(40, 0.25f));
}

}  // namespace
}  // namespace tandem::kernels
