// Arrays on a GPU for tests of its kernels, which skip where there is none.
#ifndef TANDEM_COMMON_KERNELS_CUDA_TESTING_DEVICE_ARRAYS_H_
#define TANDEM_COMMON_KERNELS_CUDA_TESTING_DEVICE_ARRAYS_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

namespace tandem::kernels {

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

// Numbers of the type that a kernel reads: float32, or bfloat16 in its upper halves.
class Numbers {
 public:
  // Values lose the bits that bfloat16 does not have.
  Numbers(const std::vector<float>& values, bool bfloat16) : bfloat16_(bfloat16) {
    for (const float value : values) {
      const auto half = static_cast<uint16_t>(Bits(value) >> 16);
      halves_.push_back(half);
      values_.push_back(bfloat16 ? Widened(half) : value);
    }
    if (bfloat16) {
      of_halves_.emplace(halves_);
    } else {
      of_values_.emplace(values_);
    }
  }

  Numbers(size_t size, bool bfloat16, std::mt19937& generator)
      : Numbers(Normal(size, generator), bfloat16) {}

  void* get() const {
    return bfloat16_ ? static_cast<void*>(of_halves_->get()) : of_values_->get();
  }
  double operator[](size_t i) const { return values_[i]; }
  // Returns what a kernel wrote.
  std::vector<float> Read() const {
    if (!bfloat16_) return of_values_->Read();
    std::vector<float> values;
    for (const uint16_t half : of_halves_->Read()) values.push_back(Widened(half));
    return values;
  }

 private:
  static std::vector<float> Normal(size_t size, std::mt19937& generator) {
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> values(size);
    for (float& value : values) value = normal(generator);
    return values;
  }
  static uint32_t Bits(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static float Widened(uint16_t half) {
    const uint32_t bits = uint32_t{half} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  bool bfloat16_;
  std::vector<uint16_t> halves_;
  std::vector<float> values_;
  std::optional<DeviceArray<uint16_t>> of_halves_;
  std::optional<DeviceArray<float>> of_values_;
};

// Expects a number of the type, rounded once.
inline void ExpectRounded(double actual, double expected, bool bfloat16) {
  ASSERT_NEAR(actual, expected, (std::abs(expected) + 1e-3) * (bfloat16 ? 1.0 / 250 : 1e-5));
}

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_TESTING_DEVICE_ARRAYS_H_
