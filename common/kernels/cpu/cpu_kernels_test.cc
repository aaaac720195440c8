#include "common/kernels/cpu/cpu_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

namespace tandem::kernels {
namespace {

using Floats = std::vector<float>;

Floats RandomFloats(size_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Returns the j-th of the bf16 numbers that overwrote a row of floats.
float Bfloat16(const float* row, int64_t j) {
  uint16_t upper_half = 0;
  std::memcpy(&upper_half, reinterpret_cast<const char*>(row) + 2 * j, 2);
  const uint32_t bits = uint32_t{upper_half} << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Every instruction set that this CPU has.
class CpuKernelsTest : public testing::TestWithParam<CpuFeatures> {
 protected:
  void SetUp() override {
    const CpuFeatures cpu = DetectCpuFeatures();
    if ((GetParam().avx2 && !cpu.avx2) || (GetParam().avx512 && !cpu.avx512)) {
      GTEST_SKIP() << "this CPU has no " << kernels_->name;
    }
  }
  const CpuKernels table_ = ChooseCpuKernels(GetParam());
  const CpuKernels* const kernels_ = &table_;
};

INSTANTIATE_TEST_SUITE_P(InstructionSet, CpuKernelsTest,
                         testing::Values(CpuFeatures{}, CpuFeatures{.avx2 = true},
                                         CpuFeatures{.avx2 = true, .avx512 = true}),
                         [](const auto& info) {
                           return std::string(ChooseCpuKernels(info.param).name);
                         });

TEST_P(CpuKernelsTest, LinearMatchesDouble) {
  for (const int64_t in : {1, 7, 64, 83}) {
    const int64_t rows = 9, out = 13;
    const Floats x = RandomFloats(rows * in, 1), w = RandomFloats(out * in, 2);
    const Floats bias = RandomFloats(out, 3);
    Floats y(rows * out, 0.5f);
    kernels_->linear({x.data(), in, w.data(), bias.data(), y.data(), out, rows, in, 0, out, true});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < out; ++o) {
        double expected = 0.5 + bias[o];
        for (int64_t k = 0; k < in; ++k) expected += double{x[r * in + k]} * w[o * in + k];
        EXPECT_NEAR(y[r * out + o], expected, 1e-5) << in << " " << r << " " << o;
      }
    }
  }
}

// The sizes cover tiles of every shape and both ways to keep operands in the caches, for few rows
// and for many.
TEST_P(CpuKernelsTest, LinearRowsDoNotDependOnTheSplit) {
  for (const int64_t in : {75, 1603}) {
    for (const int64_t rows : {2, 5, 10, 13, 100}) {
      const int64_t out = 11;
      const Floats x = RandomFloats(rows * in, 4), w = RandomFloats(out * in, 5);
      Floats whole(rows * out), split(rows * out);
      kernels_->linear(
          {x.data(), in, w.data(), nullptr, whole.data(), out, rows, in, 0, out, false});
      for (int64_t r = 0; r < rows; ++r) {
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 3}, {3, 10}, {10, 11}}) {
          kernels_->linear(
              {&x[r * in], in, w.data(), nullptr, &split[r * out], out, 1, in, begin, end, false});
        }
      }
      EXPECT_EQ(whole, split) << in << " " << rows;
    }
  }
}

TEST_P(CpuKernelsTest, TransposedLinearMatchesDoubleAndRowsDoNotDependOnOthers) {
  for (const int64_t out : {1, 16, 67, 130}) {
    const int64_t rows = 9, in = 21, stride = out + 3;
    const Floats x = RandomFloats(rows * in, 1), w = RandomFloats(in * stride, 2);
    Floats y(rows * out), single(rows * out);
    kernels_->transposed_linear({x.data(), in, w.data(), stride, y.data(), out, rows, in, out});
    for (int64_t r = 0; r < rows; ++r) {
      kernels_->transposed_linear(
          {&x[r * in], in, w.data(), stride, &single[r * out], out, 1, in, out});
      for (int64_t o = 0; o < out; ++o) {
        double expected = 0;
        for (int64_t k = 0; k < in; ++k) expected += double{x[r * in + k]} * w[k * stride + o];
        ASSERT_NEAR(y[r * out + o], expected, 5e-6) << out;
      }
    }
    EXPECT_EQ(y, single) << out;
  }
}

struct AttentionProblem {
  int64_t length, group, head_dim, window;
  float soft_cap;
  Floats q, k, v;
  AttentionProblem(int64_t length, int64_t group, int64_t head_dim, int64_t window = kNoWindow,
                   float soft_cap = 0)
      : length(length),
        group(group),
        head_dim(head_dim),
        window(window),
        soft_cap(soft_cap),
        q(RandomFloats(length * group * head_dim, 6, 2.0f)),
        k(RandomFloats(length * head_dim, 7)),
        v(RandomFloats(length * head_dim, 8)) {}

  // Computes the rows [begin, begin + rows) into their places in `out`.
  void Run(const CpuKernels& kernels, int64_t begin, int64_t rows, Floats& out) const {
    const int64_t width = group * head_dim;
    kernels.attention({&q[begin * width], width, k.data(), head_dim, v.data(), head_dim,
                       &out[begin * width], width, rows, group, head_dim, head_dim, begin,
                       1.0f / std::sqrt(static_cast<float>(head_dim)), /*blocks=*/nullptr,
                       /*block_stride=*/0, window, soft_cap});
  }
};

// Smaller than a block, a block, neither a multiple of it, as long as the sequence, and longer.
constexpr int64_t kWindows[] = {1, 5, 64, 100, 150, 1000};

TEST_P(CpuKernelsTest, AttentionMatchesDouble) {
  for (const auto& [length, group, head_dim, window, soft_cap] :
       {std::tuple<int64_t, int64_t, int64_t, int64_t, float>{1, 1, 2, kNoWindow, 0},
        {70, 3, 12, kNoWindow, 0},
        {200, 1, 64, kNoWindow, 0},
        {65, 5, 80, kNoWindow, 0},
        {200, 3, 12, 1, 0},
        {200, 3, 12, 7, 0},
        {200, 1, 64, 64, 0},
        {200, 2, 20, 100, 0},
        {65, 5, 80, 65, 0},
        {65, 5, 80, 66, 0},
        {70, 3, 12, kNoWindow, 1.5f},
        {200, 1, 64, kNoWindow, 50},
        {200, 2, 20, 100, 3}}) {
    const AttentionProblem problem(length, group, head_dim, window, soft_cap);
    Floats out(problem.q.size());
    problem.Run(*kernels_, 0, length, out);
    for (int64_t row = 0; row < length; ++row) {
      for (int64_t g = 0; g < group; ++g) {
        const float* q = &problem.q[(row * group + g) * head_dim];
        std::vector<double> scores(row + 1);
        double highest = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t j = std::max<int64_t>(0, row - window + 1); j <= row; ++j) {
          for (int64_t d = 0; d < head_dim; ++d) {
            scores[j] += double{q[d]} * problem.k[j * head_dim + d];
          }
          scores[j] /= std::sqrt(static_cast<double>(head_dim));
          if (soft_cap > 0) scores[j] = soft_cap * std::tanh(scores[j] / soft_cap);
          highest = std::max(highest, scores[j]);
        }
        for (int64_t j = 0; j <= row; ++j) {
          scores[j] = row - j < window ? std::exp(scores[j] - highest) : 0;
          sum += scores[j];
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          double expected = 0;
          for (int64_t j = 0; j <= row; ++j) {
            expected += scores[j] / sum * problem.v[j * head_dim + d];
          }
          ASSERT_NEAR(out[(row * group + g) * head_dim + d], expected, 5e-6);
        }
      }
    }
  }
}

// Latent attention: the values are columns of the keys.
TEST_P(CpuKernelsTest, NarrowerValuesAreTheColumnsOfWiderOnes) {
  for (const auto& [head_dim, value_dim] :
       {std::pair<int64_t, int64_t>{5, 3}, {20, 16}, {80, 71}, {72, 64}}) {
    AttentionProblem problem(150, 3, head_dim);
    problem.v = problem.k;
    Floats wide(problem.q.size()), narrow(150 * 3 * value_dim);
    problem.Run(*kernels_, 0, 150, wide);
    kernels_->attention({problem.q.data(), 3 * head_dim, problem.k.data(), head_dim,
                         problem.k.data(), head_dim, narrow.data(), 3 * value_dim, 150, 3, head_dim,
                         value_dim, 0, 1.0f / std::sqrt(static_cast<float>(head_dim))});
    for (int64_t row = 0; row < 150 * 3; ++row) {
      for (int64_t d = 0; d < value_dim; ++d) {
        ASSERT_NEAR(narrow[row * value_dim + d], wide[row * head_dim + d], 1e-6) << head_dim;
      }
    }
  }
}

TEST_P(CpuKernelsTest, AttentionRowsDoNotDependOnChunking) {
  for (const int64_t window : kWindows) {
    const AttentionProblem problem(150, 3, 20, window, window == 64 ? 2.0f : 0.0f);
    Floats whole(problem.q.size()), chunks(problem.q.size()), single(problem.q.size());
    problem.Run(*kernels_, 0, 150, whole);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 63}, {63, 64}, {64, 150}}) {
      problem.Run(*kernels_, begin, end - begin, chunks);
    }
    for (int64_t row = 0; row < 150; ++row) problem.Run(*kernels_, row, 1, single);
    EXPECT_EQ(whole, chunks) << window;
    EXPECT_EQ(whole, single) << window;
  }
}

TEST_P(CpuKernelsTest, AWindowThatHoldsTheSequenceIsNone) {
  const AttentionProblem none(150, 3, 20), all(150, 3, 20, 150), shorter(150, 3, 20, 149);
  Floats expected(none.q.size()), out(none.q.size());
  none.Run(*kernels_, 0, 150, expected);
  all.Run(*kernels_, 0, 150, out);
  EXPECT_EQ(out, expected);
  shorter.Run(*kernels_, 0, 150, out);
  EXPECT_NE(out, expected);
}

TEST_P(CpuKernelsTest, AttentionNeverReadsBlocksBeforeTheWindow) {
  AttentionProblem problem(200, 2, 16, 70);
  Floats before(problem.q.size()), after(problem.q.size());
  problem.Run(*kernels_, 133, 67, before);  // the first row's window begins at position 64
  for (int64_t i = 0; i < 64 * 16; ++i) {
    problem.k[i] = problem.v[i] = std::numeric_limits<float>::quiet_NaN();
  }
  problem.Run(*kernels_, 133, 67, after);
  EXPECT_EQ(before, after);
}

// The head sizes leave a tail behind the vectors of every instruction set, or none.
TEST_P(CpuKernelsTest, AttentionToBfloat16HasTheBitsOfFloatsOfEqualValue) {
  for (const int64_t head_dim : {3, 20, 64}) {
    AttentionProblem problem(150, 3, head_dim, kNoWindow, head_dim == 20 ? 2.0f : 0.0f);
    const auto round = [](Floats& values) {
      std::vector<uint16_t> halves;
      for (float& value : values) {
        uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        halves.push_back(static_cast<uint16_t>(bits >> 16));
        value = Bfloat16(reinterpret_cast<const float*>(halves.data()),
                         static_cast<int64_t>(halves.size()) - 1);
      }
      return halves;
    };
    const std::vector<uint16_t> k = round(problem.k), v = round(problem.v);
    Floats expected(problem.q.size()), out(problem.q.size());
    problem.Run(*kernels_, 0, 150, expected);
    const int64_t width = 3 * head_dim;
    kernels_->bfloat16_attention(
        {problem.q.data(), width, k.data(), head_dim, v.data(), head_dim, out.data(), width, 150, 3,
         head_dim, head_dim, 0, 1.0f / std::sqrt(static_cast<float>(head_dim)),
         /*blocks=*/nullptr, /*block_stride=*/0, kNoWindow, problem.soft_cap});
    EXPECT_EQ(out, expected) << head_dim;
  }
}

TEST_P(CpuKernelsTest, AttentionNeverReadsTheFuture) {
  AttentionProblem problem(100, 2, 16);
  Floats before(problem.q.size()), after(problem.q.size());
  problem.Run(*kernels_, 0, 50, before);
  for (int64_t i = 50 * 16; i < 100 * 16; ++i) {
    problem.k[i] = problem.v[i] = std::numeric_limits<float>::quiet_NaN();
  }
  problem.Run(*kernels_, 0, 50, after);
  EXPECT_EQ(before, after);
}

// Rows of one call, whose keys end at different places.
TEST_P(CpuKernelsTest, AttentionDoesNotMultiplyValuesOfTheFuture) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t head_dim : {3, 20, 64}) {
    for (const int64_t bad : {1, 6, 63, 64, 70}) {
      AttentionProblem problem(80, 1, head_dim);
      const auto before_bad = static_cast<std::ptrdiff_t>(bad * head_dim);
      Floats expected(problem.q.size()), out(problem.q.size());
      problem.Run(*kernels_, 0, 80, expected);
      for (const float value : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        std::fill_n(&problem.v[bad * head_dim], head_dim, value);
        problem.Run(*kernels_, 0, 80, out);
        EXPECT_TRUE(std::equal(out.begin(), out.begin() + before_bad, expected.begin()))
            << head_dim << " " << bad;
        EXPECT_FALSE(std::isfinite(out[before_bad]));
      }
    }
  }
}

TEST_P(CpuKernelsTest, AttentionSurvivesExtremeScores) {
  for (const float soft_cap : {0.0f, 50.0f}) {
    AttentionProblem problem(130, 1, 16, kNoWindow, soft_cap);
    for (float& q : problem.q) q *= 1e4f;
    Floats out(problem.q.size());
    problem.Run(*kernels_, 0, 130, out);
    for (const float value : out) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST_P(CpuKernelsTest, SoftCapMatchesDouble) {
  constexpr float kCap = 30;
  Floats x = {0, 1e-20f, -1e-3f, 18.74f, 18.76f, -1e30f, std::numeric_limits<float>::infinity()};
  for (const float scale : {0.01f, 1.0f, 10.0f, 100.0f}) {
    const Floats more = RandomFloats(40, 3, scale);
    x.insert(x.end(), more.begin(), more.end());
  }
  Floats y = x;
  kernels_->soft_cap({y.data(), static_cast<int64_t>(y.size()), kCap});
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = kCap * std::tanh(double{x[i]} / kCap);
    EXPECT_NEAR(y[i], expected, 4e-7 * std::abs(expected)) << x[i];
    // The bits of a number depend on that number alone.
    float alone = x[i];
    kernels_->soft_cap({&alone, 1, kCap});
    EXPECT_EQ(alone, y[i]) << x[i];
  }
  float nan = std::numeric_limits<float>::quiet_NaN();
  kernels_->soft_cap({&nan, 1, kCap});
  EXPECT_TRUE(std::isnan(nan));
}

TEST_P(CpuKernelsTest, RmsNormMatchesDouble) {
  for (const int64_t width : {3, 16, 45}) {
    const Floats x = RandomFloats(2 * width, 9), w = RandomFloats(width, 10);
    Floats y(2 * width);
    kernels_->rms_norm({x.data(), width, w.data(), y.data(), width, 2, width, 1e-5f});
    for (int64_t i = 0; i < 2 * width; ++i) {
      double squares = 0;
      for (int64_t k = 0; k < width; ++k) {
        squares += double{x[i / width * width + k]} * x[i / width * width + k];
      }
      EXPECT_NEAR(y[i], x[i] / std::sqrt(squares / width + 1e-5) * w[i % width], 2e-6);
    }
  }
}

TEST_P(CpuKernelsTest, RmsNormBackwardMatchesDouble) {
  for (const int64_t width : {3, 16, 45}) {
    const int64_t rows = 2;
    const Floats x = RandomFloats(rows * width, 9), w = RandomFloats(width, 10);
    const Floats dy = RandomFloats(rows * width, 11);
    Floats dx(rows * width), dw(width, 0.5f);
    kernels_->rms_norm_backward({x.data(), width, w.data(), dy.data(), width, dx.data(), width,
                                 dw.data(), rows, width, 1e-5f});
    std::vector<double> expected_dw(width, 0.5);
    for (int64_t r = 0; r < rows; ++r) {
      double squares = 0, product = 0;
      for (int64_t k = 0; k < width; ++k) {
        const int64_t i = r * width + k;
        squares += double{x[i]} * x[i];
        product += double{x[i]} * w[k] * dy[i];
      }
      const double factor = 1 / std::sqrt(squares / width + 1e-5);
      for (int64_t k = 0; k < width; ++k) {
        const int64_t i = r * width + k;
        expected_dw[k] += x[i] * factor * dy[i];
        const double expected =
            factor * (double{w[k]} * dy[i] - x[i] * factor * factor * product / width);
        EXPECT_NEAR(dx[i], expected, 3e-6 * (1 + std::abs(expected))) << width << " " << i;
      }
    }
    for (int64_t k = 0; k < width; ++k) EXPECT_NEAR(dw[k], expected_dw[k], 3e-6) << width;
  }
}

// u(g) and its derivative, for which the activation is g sigmoid(u(g)).
struct GateOracle {
  GateActivation activation;
  double (*argument)(double g);
  double (*slope)(double g);
};
const GateOracle kGates[] = {
    {GateActivation::kSilu, [](double g) { return g; }, [](double) { return 1.0; }},
    {GateActivation::kGeluTanh,
     [](double g) { return std::sqrt(8 / std::numbers::pi) * (g + 0.044715 * g * g * g); },
     [](double g) { return std::sqrt(8 / std::numbers::pi) * (1 + 3 * 0.044715 * g * g); }}};

Floats GatesWithExtremes() {
  Floats gate = RandomFloats(37, 11, 4.0f);
  gate[0] = -200, gate[1] = 200, gate[2] = -88, gate[3] = 0;
  return gate;
}

TEST_P(CpuKernelsTest, GatedBackwardMatchesDoubleForExtremeGatesToo) {
  const Floats gate = GatesWithExtremes(), up = RandomFloats(37, 12), dy = RandomFloats(37, 13);
  for (const GateOracle& oracle : kGates) {
    Floats d_gate(37), d_up(37);
    kernels_->gated_backward({gate.data(), up.data(), 37, dy.data(), 37, d_gate.data(), d_up.data(),
                              37, 1, 37, oracle.activation});
    for (int i = 0; i < 37; ++i) {
      const double g = gate[i], s = 1 / (1 + std::exp(-oracle.argument(g)));
      const double expected = double{dy[i]} * up[i] * s * (1 + g * (1 - s) * oracle.slope(g));
      EXPECT_NEAR(d_gate[i], expected, 2e-6 * (1 + std::abs(expected))) << g;
      EXPECT_NEAR(d_up[i], dy[i] * g * s, 2e-6 * (1 + std::abs(dy[i] * g * s))) << g;
    }
  }
}

TEST_P(CpuKernelsTest, GatedMatchesDoubleForExtremeGatesToo) {
  const Floats gate = GatesWithExtremes(), up = RandomFloats(37, 12);
  for (const GateOracle& oracle : kGates) {
    Floats y(37);
    kernels_->gated({gate.data(), up.data(), 37, y.data(), 37, 1, 37, oracle.activation});
    for (int i = 0; i < 37; ++i) {
      const double expected = gate[i] / (1 + std::exp(-oracle.argument(gate[i]))) * up[i];
      EXPECT_NEAR(y[i], expected, 1e-6 * (1 + std::abs(expected))) << gate[i];
    }
  }
}

TEST_P(CpuKernelsTest, RotaryRotatesPairsHalfAHeadApart) {
  const Floats x = {1, 2, 3, 4, 5, 6, 7, 8};  // two heads of four
  const Floats cos = {0.6f, 0.8f}, sin = {0.8f, -0.6f};
  Floats y(8);
  kernels_->rotary({x.data(), 8, cos.data(), sin.data(), y.data(), 8, 4, 1, 2, 4, 4});
  const Floats expected = {1 * 0.6f - 3 * 0.8f, 2 * 0.8f + 4 * 0.6f, 3 * 0.6f + 1 * 0.8f,
                           4 * 0.8f - 2 * 0.6f, 5 * 0.6f - 7 * 0.8f, 6 * 0.8f + 8 * 0.6f,
                           7 * 0.6f + 5 * 0.8f, 8 * 0.8f - 6 * 0.6f};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(y[i], expected[i], 1e-6);
}

TEST_P(CpuKernelsTest, RotaryCopiesTheColumnsThatItDoesNotRotate) {
  const Floats x = {1, 2, 3, 4, 5, 6, 7, 8};  // two heads of four, of which two are rotated
  const Floats cos = {0.6f}, sin = {0.8f};
  Floats y(8);
  kernels_->rotary({x.data(), 8, cos.data(), sin.data(), y.data(), 8, 4, 1, 2, 4, 2});
  const Floats expected = {1 * 0.6f - 2 * 0.8f, 2 * 0.6f + 1 * 0.8f, 3, 4,
                           5 * 0.6f - 6 * 0.8f, 6 * 0.6f + 5 * 0.8f, 7, 8};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(y[i], expected[i], 1e-6);
}

// The widths are whole vectors, less than one, and both together.
TEST_P(CpuKernelsTest, LogitStatisticsAndGradientMatchDouble) {
  for (const int64_t width : {1, 5, 16, 64, 77}) {
    const int64_t rows = 3;
    const Floats scales = {1, 0.5f, 2};
    Floats logits = RandomFloats(rows * width, 5, 8.0f), max(rows), sum(rows), weighted(rows);
    const Floats before = logits, constants = {0.3f, -1, 2}, slopes = {0.1f, 0, -0.7f};
    kernels_->logit_statistics(
        {logits.data(), scales.data(), rows, width, max.data(), sum.data(), weighted.data()});
    EXPECT_EQ(logits, before);
    Floats rounded = before;
    for (const bool bfloat16 : {false, true}) {
      kernels_->logit_gradient({bfloat16 ? rounded.data() : logits.data(), scales.data(), rows,
                                width, max.data(), constants.data(), slopes.data(), bfloat16});
    }
    for (int64_t row = 0; row < rows; ++row) {
      double highest = -std::numeric_limits<double>::infinity(), total = 0, weights = 0;
      const auto z = [&](int64_t j) { return double{before[row * width + j]} * scales[row]; };
      for (int64_t j = 0; j < width; ++j) highest = std::max(highest, z(j));
      for (int64_t j = 0; j < width; ++j) {
        const double d = z(j) - highest;
        total += std::exp(d);
        weights += std::exp(d) * d;
        const float gradient = logits[row * width + j];
        EXPECT_NEAR(gradient, std::exp(d) * (constants[row] + slopes[row] * d), 1e-5);
        EXPECT_NEAR(Bfloat16(&rounded[row * width], j), gradient, std::abs(gradient) / 256);
      }
      EXPECT_EQ(max[row], static_cast<float>(highest));
      EXPECT_NEAR(sum[row], total, 1e-6 * total);
      EXPECT_NEAR(weighted[row], weights, 1e-5);
    }
  }
}

TEST_P(CpuKernelsTest, DivergenceMatchesDouble) {
  for (const int64_t width : {1, 5, 16, 77, 2100}) {
    const int64_t rows = 3;
    const Floats scales = {1, 0.5f, 2};
    const Floats before = RandomFloats(rows * width, 6), teacher = RandomFloats(rows * width, 7);
    for (const bool forward : {false, true}) {
      Floats logits = before, rounded = before, untouched = before;
      std::vector<double> max(rows), teacher_max(rows), sum(rows), teacher_sum(rows), moment(rows);
      kernels_->divergence_statistics({untouched.data(), teacher.data(), scales.data(), rows, width,
                                       forward, max.data(), teacher_max.data(), sum.data(),
                                       teacher_sum.data(), moment.data()});
      EXPECT_EQ(untouched, before);
      std::vector<double> divergences(rows);
      Floats factors(rows), offsets(rows);
      for (int64_t row = 0; row < rows; ++row) {
        const double ratio = sum[row] / teacher_sum[row];
        const double mean = moment[row] / (forward ? teacher_sum[row] : sum[row]);
        divergences[row] = mean + (forward ? std::log(ratio) : -std::log(ratio));
        factors[row] = static_cast<float>(0.7 * scales[row] / sum[row]);
        offsets[row] = static_cast<float>(forward ? ratio : mean);
      }
      const Floats float_max(max.begin(), max.end()),
          float_teacher_max(teacher_max.begin(), teacher_max.end());
      const auto run = [&](Floats& z, bool bfloat16) {
        kernels_->divergence_gradient({z.data(), teacher.data(), scales.data(), rows, width,
                                       forward, float_max.data(), float_teacher_max.data(),
                                       factors.data(), offsets.data(), bfloat16});
      };
      run(rounded, true);
      run(logits, false);
      for (int64_t row = 0; row < rows; ++row) {
        const auto log_sum = [&](const Floats& x) {
          double sum = 0;
          for (int64_t j = 0; j < width; ++j) {
            sum += std::exp(double{x[row * width + j]} * scales[row]);
          }
          return std::log(sum);
        };
        const double log_p = log_sum(before), log_q = log_sum(teacher);
        const auto ratio = [&](int64_t j) {  // log p_j - log q_j
          return (double{before[row * width + j]} - double{teacher[row * width + j]}) *
                     scales[row] -
                 log_p + log_q;
        };
        const auto p = [&](int64_t j) {
          return std::exp(double{before[row * width + j]} * scales[row] - log_p);
        };
        double expected = 0;
        for (int64_t j = 0; j < width; ++j) {
          expected += forward ? -p(j) * std::exp(-ratio(j)) * ratio(j) : p(j) * ratio(j);
        }
        EXPECT_NEAR(divergences[row], expected, 1e-6 * (1 + expected));
        for (int64_t j = 0; j < width; ++j) {
          const double dz =
              forward ? p(j) - p(j) * std::exp(-ratio(j)) : p(j) * (ratio(j) - expected);
          const float gradient = logits[row * width + j];
          EXPECT_NEAR(gradient, 0.7 * scales[row] * dz, 1e-6);
          EXPECT_NEAR(Bfloat16(&rounded[row * width], j), gradient, std::abs(gradient) / 256);
        }
      }
    }
  }
}

// The gradients of logits through a soft cap are those without one, times its derivative.
TEST_P(CpuKernelsTest, GradientsOfLogitsGoThroughASoftCap) {
  constexpr float kCap = 5;
  for (const int64_t width : {1, 5, 77}) {
    Floats logits = RandomFloats(width, 6);
    const Floats teacher = RandomFloats(width, 7), scales = {0.5f};
    kernels_->soft_cap({logits.data(), width, kCap});
    const Floats max = {3}, first = {0.3f}, second = {-0.7f};
    const auto expect_slope = [&](const auto& run) {
      Floats without = logits, with = logits, rounded = logits;
      run(without, false, 0.0f);
      run(with, false, kCap);
      run(rounded, true, kCap);
      for (int64_t j = 0; j < width; ++j) {
        const double slope = 1 - std::pow(double{logits[j]} / kCap, 2);
        EXPECT_NEAR(with[j], slope * without[j], 1e-6 * std::abs(without[j])) << width;
        EXPECT_NEAR(Bfloat16(rounded.data(), j), with[j], std::abs(with[j]) / 256) << width;
      }
    };
    expect_slope([&](Floats& z, bool bfloat16, float soft_cap) {
      kernels_->logit_gradient({z.data(), scales.data(), 1, width, max.data(), first.data(),
                                second.data(), bfloat16, soft_cap});
    });
    for (const bool forward : {false, true}) {
      expect_slope([&](Floats& z, bool bfloat16, float soft_cap) {
        kernels_->divergence_gradient({z.data(), teacher.data(), scales.data(), 1, width, forward,
                                       max.data(), max.data(), first.data(), second.data(),
                                       bfloat16, soft_cap});
      });
    }
  }
}

TEST_P(CpuKernelsTest, ANanAmongTheLogitsMakesTheStatisticsNan) {
  Floats logits(40, 1.0f), max(1), sum(1), weighted(1);
  logits[7] = std::numeric_limits<float>::quiet_NaN();
  kernels_->logit_statistics(
      {logits.data(), nullptr, 1, 40, max.data(), sum.data(), weighted.data()});
  EXPECT_TRUE(std::isnan(sum[0]));
}

TEST(ChooseCpuKernelsTest, FollowsWhatTheCpuHas) {
  const auto names = [](const CpuFeatures& cpu) {
    const CpuKernels kernels = ChooseCpuKernels(cpu);
    return std::vector<std::string>{kernels.name, kernels.float_product.name,
                                    kernels.bfloat16_product.name};
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names({}), (Names{"portable", "libtorch", "libtorch"}));
#ifdef __x86_64__
  EXPECT_EQ(names({.avx2 = true}), (Names{"avx2", "libtorch", "libtorch"}));
  CpuFeatures cpu = {.avx2 = true, .avx512 = true};
  EXPECT_EQ(names(cpu), (Names{"avx512", "avx512", "libtorch"}));
  cpu.avx512_bf16 = true;
  EXPECT_EQ(names(cpu), (Names{"avx512", "avx512", "avx512_bf16"}));
  EXPECT_FALSE(ChooseCpuKernels(cpu).bfloat16_product.prefers_recompute);
  cpu.amx = true;
  EXPECT_EQ(names(cpu), (Names{"avx512", "avx512", "amx"}));
  EXPECT_TRUE(ChooseCpuKernels(cpu).bfloat16_product.prefers_recompute);
  EXPECT_FALSE(ChooseCpuKernels(cpu).float_product.prefers_recompute);
  // On Intel's CPUs MKL is the fastest but for the tile registers.
  cpu.intel = true;
  EXPECT_EQ(names(cpu), (Names{"avx512", "libtorch", "amx"}));
  cpu.amx = false;
  EXPECT_EQ(names(cpu), (Names{"avx512", "libtorch", "libtorch"}));
#endif
}

TEST(GetCpuKernelsTest, ReturnsTheTableThatWasSet) {
  const char* const fastest = ChooseCpuKernels(DetectCpuFeatures()).name;
  EXPECT_STREQ(GetCpuKernels().name, fastest);
  UseCpuKernels(&kAtenKernels);
  EXPECT_EQ(&GetCpuKernels(), &kAtenKernels);
  EXPECT_EQ(GetCpuKernels().linear, nullptr);
  UseCpuKernels(nullptr);
  EXPECT_STREQ(GetCpuKernels().name, fastest);
}

}  // namespace
}  // namespace tandem::kernels
