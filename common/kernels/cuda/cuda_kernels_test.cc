#include "common/kernels/cuda/cuda_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

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

class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~DeviceFloats() { cudaFree(data_); }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;

  float* get() const { return static_cast<float*>(data_); }
  std::vector<float> Read() const {
    std::vector<float> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

TEST_F(CudaKernelsTest, RmsNormMatchesDouble) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const int64_t width : {1, 31, 256, 1000}) {
    const int64_t rows = 5;
    std::vector<float> x(rows * width), w(width);
    for (float& value : x) value = normal(generator);
    for (float& value : w) value = normal(generator);
    const DeviceFloats dx(x), dw(w), dy(std::vector<float>(x.size()));
    ASSERT_EQ(RmsNormCuda(dx.get(), dw.get(), dy.get(), rows, width, 1e-5f, nullptr), cudaSuccess);
    const std::vector<float> y = dy.Read();
    for (int64_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (int64_t k = 0; k < width; ++k) squares += std::pow(double{x[row * width + k]}, 2);
      for (int64_t k = 0; k < width; ++k) {
        const double expected = x[row * width + k] / std::sqrt(squares / width + 1e-5) * w[k];
        ASSERT_NEAR(y[row * width + k], expected, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
