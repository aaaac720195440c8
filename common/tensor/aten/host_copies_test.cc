#include "common/tensor/aten/host_copies.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace tandem {
namespace {

// The devices of this machine. Those of the host are staged in the buffers, too.
std::vector<at::Device> Devices() {
  std::vector<at::Device> devices = {at::kCPU};
  if (at::hasCUDA()) devices.emplace_back(at::kCUDA, 0);
  return devices;
}

// Collects values, and the addresses at which readers saw them.
class Collected {
 public:
  HostCopies::Reader Reader() {
    return [this](const at::Tensor& values) {
      EXPECT_TRUE(values.is_cpu() && values.is_contiguous());
      EXPECT_EQ(values.dim(), 1);
      values_.push_back(values.clone());
      addresses_.insert(values.const_data_ptr());
      return absl::OkStatus();
    };
  }
  at::Tensor values() const { return at::cat(values_); }
  size_t calls() const { return values_.size(); }
  size_t addresses() const { return addresses_.size(); }

 private:
  std::vector<at::Tensor> values_;
  std::set<const void*> addresses_;
};

// The buffers hold 4 to 64 of the values, so that tensors share one or need many.
TEST(HostCopiesTest, AllValuesAreReadInOrderWhateverTheBufferHolds) {
  for (const at::Device device : Devices()) {
    for (const int64_t buffer_bytes : {1, 16, 24, 100, 256, 1 << 20}) {
      SCOPED_TRACE(testing::Message() << device << ", " << buffer_bytes);
      HostCopies copies(buffer_bytes, /*stage_all=*/true);
      Collected collected;
      std::vector<at::Tensor> expected;
      for (int64_t i = 0; i < 20; ++i) {
        const int64_t numel = i * i % 37;
        const at::Tensor tensor = at::arange(numel, at::kFloat).add(1000 * i).to(device);
        expected.push_back(tensor.cpu());
        ASSERT_TRUE(copies.Add(tensor, at::kFloat, collected.Reader()).ok());
      }
      ASSERT_TRUE(copies.Finish().ok());
      EXPECT_TRUE(at::equal(collected.values(), at::cat(expected)));
    }
  }
}

TEST(HostCopiesTest, ValuesAreConvertedAndFlattened) {
  for (const at::Device device : Devices()) {
    const at::Tensor matrix = at::arange(12, at::kBFloat16).view({3, 4}).t().to(device);
    const at::Tensor ids = at::arange(5, at::kInt).to(device);
    const at::Tensor scalar = at::full({}, -2.5).to(device);
    HostCopies copies(20, /*stage_all=*/true);
    Collected floats, longs, halves;
    ASSERT_TRUE(copies.Add(matrix, at::kFloat, floats.Reader()).ok());
    ASSERT_TRUE(copies.Add(ids, at::kLong, longs.Reader()).ok());
    ASSERT_TRUE(copies.Add(scalar, at::kBFloat16, halves.Reader()).ok());
    ASSERT_TRUE(copies.Finish().ok());
    EXPECT_TRUE(at::equal(floats.values(), matrix.cpu().to(at::kFloat).reshape({-1})));
    EXPECT_TRUE(at::equal(longs.values(), at::arange(5, at::kLong)));
    EXPECT_TRUE(at::equal(halves.values(), at::full({1}, -2.5).to(at::kBFloat16)));
  }
}

// A gathering source gives every tensor in the same memory.
TEST(HostCopiesTest, ATensorMayChangeAsSoonAsItWasAdded) {
  for (const at::Device device : Devices()) {
    HostCopies copies(64, /*stage_all=*/true);
    Collected collected;
    at::Tensor memory = at::zeros({10}, device);
    for (int i = 0; i < 9; ++i) {
      memory.fill_(i);
      ASSERT_TRUE(copies.Add(memory, at::kFloat, collected.Reader()).ok());
    }
    memory.fill_(-1);
    ASSERT_TRUE(copies.Finish().ok());
    EXPECT_TRUE(at::equal(collected.values(), at::arange(9, at::kFloat).repeat_interleave(10)));
  }
}

// The copies of a buffer are read while the other one fills: with two full buffers one was read.
TEST(HostCopiesTest, OneBufferFillsWhileTheOtherWaitsToBeRead) {
  HostCopies copies(40, /*stage_all=*/true);
  Collected collected;
  const at::Tensor full = at::ones({10});
  for (const size_t calls : {0U, 0U, 1U, 2U, 3U}) {
    ASSERT_TRUE(copies.Add(full, at::kFloat, collected.Reader()).ok());
    EXPECT_EQ(collected.calls(), calls);
  }
  ASSERT_TRUE(copies.Finish().ok());
  EXPECT_EQ(collected.calls(), 5U);
  EXPECT_EQ(collected.addresses(), 2U);
}

TEST(HostCopiesTest, WhatIsOnTheHostIsReadInPlace) {
  HostCopies copies;
  const at::Tensor tensor = at::ones({2, 3});
  const void* seen = nullptr;
  ASSERT_TRUE(copies
                  .Add(tensor, at::kFloat,
                       [&](const at::Tensor& values) {
                         seen = values.const_data_ptr();
                         return absl::OkStatus();
                       })
                  .ok());
  EXPECT_EQ(seen, tensor.const_data_ptr());
}

TEST(HostCopiesTest, TheFirstErrorEndsTheReading) {
  for (const int64_t buffer_bytes : {4, 1000}) {
    HostCopies copies(buffer_bytes, /*stage_all=*/true);
    int calls = 0;
    const auto fails = [&](const at::Tensor&) {
      return ++calls == 2 ? absl::DataLossError("full") : absl::OkStatus();
    };
    absl::Status status;
    for (int i = 0; i < 6 && status.ok(); ++i)
      status = copies.Add(at::ones({1}), at::kFloat, fails);
    EXPECT_EQ(status.ok(), buffer_bytes == 1000);
    EXPECT_EQ(copies.Finish(), absl::DataLossError("full"));
    EXPECT_EQ(copies.Add(at::ones({1}), at::kFloat, fails), absl::DataLossError("full"));
    EXPECT_EQ(calls, 2);
  }
}

}  // namespace
}  // namespace tandem
