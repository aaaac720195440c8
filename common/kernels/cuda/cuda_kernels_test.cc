#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "common/kernels/cuda/testing/device_arrays.h"
#include "common/kernels/device_kernels.h"

namespace tandem::kernels {
namespace {

TEST_F(CudaKernelsTest, RmsNormMatchesDouble) {
  std::mt19937 generator(3);
  for (const bool bfloat16 : {false, true}) {
    for (const int64_t width : {1, 31, 256, 700}) {
      // Heads of a wider row, with numbers between them that are of no head.
      const int64_t rows = 3, heads = 2, head_stride = width + 3, row_stride = 2 * head_stride + 5;
      const float eps = 1e-3f, offset = 0.5f;
      const Numbers x(rows * row_stride, bfloat16, generator), weight(width, bfloat16, generator);
      const Numbers y(rows * heads * width, bfloat16, generator);
      ASSERT_STREQ(kCudaKernels.rms_norm({x.get(), row_stride, head_stride, weight.get(), y.get(),
                                          rows, heads, width, eps, offset, bfloat16},
                                         nullptr),
                   nullptr);
      const std::vector<float> actual = y.Read();
      for (int64_t i = 0; i < rows * heads; ++i) {
        const int64_t begin = i / heads * row_stride + i % heads * head_stride;
        double squares = 0;
        for (int64_t j = 0; j < width; ++j) squares += x[begin + j] * x[begin + j];
        const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
        for (int64_t j = 0; j < width; ++j) {
          ExpectRounded(actual[i * width + j], x[begin + j] * scale * (weight[j] + offset),
                        bfloat16);
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, RotaryMatchesDouble) {
  std::mt19937 generator(4);
  for (const bool bfloat16 : {false, true}) {
    for (const int64_t rotated : {4, 10}) {
      const int64_t rows = 3, heads = 40, head_dim = 10, row_stride = heads * head_dim + 7;
      const int64_t half = rotated / 2;
      const Numbers x(rows * row_stride, bfloat16, generator);
      const Numbers cos(rows * half, false, generator), sin(rows * half, false, generator);
      const Numbers y(rows * heads * head_dim, bfloat16, generator);
      ASSERT_STREQ(kCudaKernels.rotary({x.get(), row_stride, static_cast<float*>(cos.get()),
                                        static_cast<float*>(sin.get()), y.get(), rows, heads,
                                        head_dim, rotated, bfloat16},
                                       nullptr),
                   nullptr);
      const std::vector<float> actual = y.Read();
      for (int64_t i = 0; i < rows * heads * head_dim; ++i) {
        const int64_t row = i / (heads * head_dim), d = i % head_dim;
        const int64_t at = row * row_stride + i % (heads * head_dim), angle = row * half + d % half;
        double expected = x[at];
        if (d < half) expected = x[at] * cos[angle] - x[at + half] * sin[angle];
        if (d >= half && d < rotated) {
          expected = x[at] * cos[angle] + x[at - half] * sin[angle];
        }
        // The two products may cancel.
        ASSERT_NEAR(actual[i], expected, bfloat16 ? std::abs(expected) / 250 + 1e-5 : 2e-5);
      }
    }
  }
}

// Maps without rows, with few rows, and with several tiles of them; a last row of no map.
const std::vector<int32_t> kOffsets = {0, 0, 3, 140, 140, 141};
constexpr int64_t kGroups = 5, kRows = 142;

// Numbers of inputs and outputs of a map.
const std::vector<std::pair<int64_t, int64_t>> kMapShapes = {{1, 1}, {34, 70}, {72, 64}};

// A sum of products in float32, which may cancel, and its rounding.
double ToleranceOfSum(double sum, double size, bool bfloat16) {
  return 1e-6 * size + (bfloat16 ? std::abs(sum) / 250 : 0.0);
}

TEST_F(CudaKernelsTest, GroupedLinearMatchesDouble) {
  std::mt19937 generator(6);
  for (const auto& [bfloat16, transposed] :
       {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
    for (const auto& [in, out] : kMapShapes) {
      const int64_t stride = in * out + 4 - in * out % 4;
      const Numbers x(kRows * in, bfloat16, generator);
      const Numbers weights(kGroups * stride, bfloat16, generator);
      const std::vector<float> unwritten(kRows * out, 7.0f);
      const DeviceArray<int32_t> on_device(kOffsets);
      const auto multiply = [&](const DeviceArray<int32_t>& begins, int64_t of) {
        const Numbers y(unwritten, bfloat16);
        EXPECT_STREQ(
            kCudaKernels.grouped_linear({x.get(), weights.get(), stride, begins.get(), y.get(),
                                         kRows, of, in, out, transposed, bfloat16},
                                        nullptr),
            nullptr);
        return y.Read();
      };
      const std::vector<float> actual = multiply(on_device, kGroups);
      for (int64_t group = 0; group < kGroups; ++group) {
        for (int64_t row = kOffsets[group]; row < kOffsets[group + 1]; ++row) {
          for (int64_t o = 0; o < out; ++o) {
            double expected = 0, size = 0;
            for (int64_t j = 0; j < in; ++j) {
              const int64_t at = transposed ? j * out + o : o * in + j;
              const double product = x[row * in + j] * weights[group * stride + at];
              expected += product;
              size += std::abs(product);
            }
            ASSERT_NEAR(actual[row * out + o], expected, ToleranceOfSum(expected, size, bfloat16));
          }
        }
      }
      for (int64_t o = 0; o < out; ++o) ASSERT_EQ(actual[(kRows - 1) * out + o], 7.0f);
      // The bits of a row do not depend on the others: map 0 with all rows, and with one.
      const std::vector<float> all = multiply(DeviceArray<int32_t>({0, kRows}), 1);
      const std::vector<float> one = multiply(DeviceArray<int32_t>({35, 36}), 1);
      for (int64_t o = 0; o < out; ++o) ASSERT_EQ(one[35 * out + o], all[35 * out + o]);
    }
  }
}

// Overwritten, where the memory has no number, and added to what is there.
TEST_F(CudaKernelsTest, GroupedGradientMatchesDouble) {
  std::mt19937 generator(7);
  for (const auto& [bfloat16, accumulate] :
       {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
    for (const auto& [in, out] : kMapShapes) {
      const int64_t stride = in * out + 3;  // a number between two maps is of none
      const Numbers x(kRows * in, bfloat16, generator), dy(kRows * out, bfloat16, generator);
      const float before = accumulate ? 0.5f : std::numeric_limits<float>::quiet_NaN();
      const DeviceFloats gradients(std::vector<float>(kGroups * stride, before));
      const DeviceArray<int32_t> offsets(kOffsets);
      ASSERT_STREQ(kCudaKernels.grouped_gradient({dy.get(), x.get(), offsets.get(), gradients.get(),
                                                  stride, kGroups, in, out, accumulate, bfloat16},
                                                 nullptr),
                   nullptr);
      const std::vector<float> actual = gradients.Read();
      for (int64_t i = 0; i < kGroups * stride; ++i) {
        const int64_t group = i / stride, at = i % stride;
        if (at >= in * out) {
          ASSERT_TRUE(accumulate ? actual[i] == before : std::isnan(actual[i]));
          continue;
        }
        double expected = accumulate ? before : 0.0, size = std::abs(expected);
        for (int64_t row = kOffsets[group]; row < kOffsets[group + 1]; ++row) {
          const double product = dy[row * out + at / in] * x[row * in + at % in];
          expected += product;
          size += std::abs(product);
        }
        ASSERT_NEAR(actual[i], expected, ToleranceOfSum(expected, size, /*bfloat16=*/false));
      }
    }
  }
}

TEST_F(CudaKernelsTest, GatesMatchDouble) {
  std::mt19937 generator(5);
  for (const bool bfloat16 : {false, true}) {
    for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh}) {
      for (const int64_t width : {1, 255, 600}) {
        const int64_t rows = 3, row_stride = 2 * width + 3;
        const Numbers gate_up(rows * row_stride, bfloat16, generator);
        const Numbers y(rows * width, bfloat16, generator);
        ASSERT_STREQ(
            kCudaKernels.gated(
                {gate_up.get(), row_stride, y.get(), rows, width, activation, bfloat16}, nullptr),
            nullptr);
        const std::vector<float> actual = y.Read();
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t at = i / width * row_stride + i % width;
          const double g = gate_up[at], z = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
          const double gate = activation == GateActivation::kSilu ? g / (1 + std::exp(-g))
                                                                  : 0.5 * g * (1 + std::tanh(z));
          const double expected = gate * gate_up[at + width];
          ASSERT_NEAR(
              actual[i], expected,
              bfloat16 ? std::abs(expected) / 250 + 1e-5 : std::abs(expected) * 1e-5 + 1e-6);
        }
      }
    }
  }
}

// The labels of the three rows are inside, before and behind the columns.
TEST_F(CudaKernelsTest, LogitStatisticsAndGradientMatchDouble) {
  std::mt19937 generator(2);
  std::normal_distribution<float> normal(0, 8);
  for (const int64_t width : {1, 33, 1000}) {
    const int64_t rows = 3, first_label = 5;
    std::vector<float> logits(rows * width);
    for (float& value : logits) value = normal(generator);
    const std::vector<float> scales = {1, 0.5f, 2}, constants = {0.3f, -1, 2};
    const std::vector<float> slopes = {0.1f, 0, -0.7f}, at_label = {1, 2, 3};
    const std::vector<int64_t> labels = {first_label, 2, first_label + width};
    const DeviceArray<int64_t> d_labels(labels);
    const DeviceFloats d_logits(logits), d_scales(scales), d_constants(constants), d_slopes(slopes),
        d_at_label(at_label);
    const DeviceFloats max(scales), sum(scales), weighted(scales), label(scales);
    ASSERT_STREQ(kCudaKernels.logit_statistics(
                     {d_logits.get(), d_scales.get(), d_labels.get(), first_label, rows, width,
                      max.get(), sum.get(), weighted.get(), label.get()},
                     nullptr),
                 nullptr);
    for (const auto& [bfloat16, soft_cap] :
         {std::pair<bool, float>{false, 0.0f}, {true, 0.0f}, {false, 40.0f}, {true, 40.0f}}) {
      const DeviceFloats dz(logits);
      ASSERT_STREQ(
          kCudaKernels.logit_gradient(
              {dz.get(), d_scales.get(), d_labels.get(), first_label, rows, width, max.get(),
               d_constants.get(), d_slopes.get(), d_at_label.get(), bfloat16, soft_cap},
              nullptr),
          nullptr);
      const std::vector<float> gradient = dz.Read();
      for (int64_t row = 0; row < rows; ++row) {
        double highest = -std::numeric_limits<double>::infinity(), total = 0, weights = 0;
        const auto z = [&](int64_t j) { return double{logits[row * width + j]} * scales[row]; };
        for (int64_t j = 0; j < width; ++j) highest = std::max(highest, z(j));
        for (int64_t j = 0; j < width; ++j) {
          const double d = z(j) - highest;
          total += std::exp(d);
          weights += std::exp(d) * d;
          double expected = std::exp(d) * (constants[row] + slopes[row] * d) +
                            (j == labels[row] - first_label ? at_label[row] : 0);
          if (soft_cap > 0) expected *= 1 - std::pow(logits[row * width + j] / soft_cap, 2);
          float actual = gradient[row * width + j];
          if (bfloat16) {
            uint16_t upper_half = 0;
            std::memcpy(&upper_half, reinterpret_cast<const char*>(&gradient[row * width]) + 2 * j,
                        2);
            const uint32_t bits = uint32_t{upper_half} << 16;
            std::memcpy(&actual, &bits, 4);
          }
          ASSERT_NEAR(actual, expected, bfloat16 ? std::abs(expected) / 200 + 1e-5 : 1e-5);
        }
        EXPECT_EQ(max.Read()[row], static_cast<float>(highest));
        EXPECT_NEAR(sum.Read()[row], total, 1e-5 * total);
        EXPECT_NEAR(weighted.Read()[row], weights, 1e-5 * (1 - weights));
        EXPECT_NEAR(label.Read()[row], row == 0 ? z(0) : 0, 1e-5);
      }
    }
  }
}

// A token that cannot be has no weight, however many a thread meets.
TEST_F(CudaKernelsTest, LogitsOfMinusInfinityHaveNoWeight) {
  constexpr int64_t kWidth = 1200;
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  std::vector<float> logits(2 * kWidth, kNever);  // the second row has none that can be
  logits[700] = 1;
  logits[1100] = 1;
  const DeviceArray<int64_t> labels(std::vector<int64_t>{700, 0});
  const DeviceFloats on_device(logits), max(std::vector<float>(2)), sum(std::vector<float>(2)),
      weighted(std::vector<float>(2)), label(std::vector<float>(2));
  ASSERT_STREQ(kCudaKernels.logit_statistics({on_device.get(), nullptr, labels.get(), 0, 2, kWidth,
                                              max.get(), sum.get(), weighted.get(), label.get()},
                                             nullptr),
               nullptr);
  EXPECT_EQ(max.Read(), (std::vector<float>{1, kNever}));
  EXPECT_EQ(sum.Read(), (std::vector<float>{2, 0}));
  EXPECT_EQ(weighted.Read()[0], 0);
}

}  // namespace
}  // namespace tandem::kernels
