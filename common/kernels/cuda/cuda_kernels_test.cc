#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "common/kernels/device_kernels.h"

namespace tandem::kernels {
namespace {

class CudaKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no usable GPU: " << cudaGetErrorString(error);
    }
  }
};

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};
using DeviceFloats = DeviceArray<float>;

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

}  // namespace
}  // namespace tandem::kernels
