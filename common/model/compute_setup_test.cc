#include "common/model/compute_setup.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "common/base/errors/error.h"
#include "common/model/device_check.h"

namespace tandem {
namespace {

using testing::HasSubstr;

#ifndef TANDEM_CUDA
// Stands for the devices of a machine with eight GPUs: a build without CUDA has no guard of its
// own.
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

at::DeviceIndex CurrentDevice() {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index();
}

ComputeOptions OnDevice(const std::string& device, int local_rank) {
  return {.device = device,
          .dtype = "float32",
          .kernels = "auto",
          .weight_dtype = "",
          .activation_dtype = "",
          .num_threads = 1,
          .local_rank = local_rank,
          .local_world_size = 8};
}

TEST(ComputeSetupTest, AThreadThatComputesSelectsTheDeviceOfItsRank) {
  for (const int local_rank : {0, 1, 7}) {
    std::thread([&] {
      SetUpComputeThread(OnDevice("cuda", local_rank));
      EXPECT_EQ(CurrentDevice(), local_rank);
    }).join();
    std::thread([&] {
      ComputeAlone(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank)));
      EXPECT_EQ(CurrentDevice(), local_rank);
      EXPECT_EQ(at::get_num_threads(), 1);
    }).join();
  }
  std::thread([&] {
    SetUpComputeThread(OnDevice("cpu", 5));
    EXPECT_EQ(CurrentDevice(), 0);
    EXPECT_EQ(at::get_num_threads(), 1);
  }).join();
}

TEST(DeviceCheckTest, ABuildWithoutCudaSaysSo) {
  EXPECT_TRUE(CheckDevice("cpu", 0).ok());
  const absl::Status refused = CheckDevice("cuda", 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldPath(refused), "compute.device");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("this build has no CUDA code"));
  EXPECT_EQ(SetUpCompute(OnDevice("cuda", 0)).status(), refused);
}
#else
TEST(DeviceCheckTest, ACudaBuildTellsWhatTheMachineLacks) {
  const bool has_device = at::hasCUDA();
  const absl::Status first = CheckDevice("cuda", 0);
  EXPECT_EQ(first.ok(), has_device) << first;
  if (!has_device) {
    EXPECT_THAT(std::string(first.message()), HasSubstr("this machine has no usable CUDA device"));
    return;
  }
  EXPECT_THAT(std::string(CheckDevice("cuda", 127).message()), HasSubstr("none of index 127"));
  FreeMemory free;
  ASSERT_TRUE(MeasureDevice(0, /*ranks=*/1, /*place=*/1, free).ok());
  EXPECT_GT(free.devices[1], 0);
  EXPECT_GE(free.device_sizes[1], free.devices[1]);
  EXPECT_FALSE(free.devices[0].has_value());
}
#endif

TEST(ComputeSetupTest, AttentionNeverGoesThroughCudnn) {
  at::globalContext().setSDPUseCuDNN(true);
  const auto placement = SetUpCompute({.device = "cpu",
                                       .dtype = "bfloat16",
                                       .kernels = "auto",
                                       .weight_dtype = "",
                                       .activation_dtype = "",
                                       .num_threads = 1});
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_FALSE(at::globalContext().userEnabledCuDNNSDP());
  EXPECT_TRUE(at::globalContext().userEnabledFlashSDP());
  EXPECT_EQ(placement->dtype, at::kBFloat16);
}

// libtorch takes the number that any thread has set last on a thread's first use.
TEST(ComputeSetupTest, AThreadKeepsItsNumberWhateverOthersSet) {
  int number = 0;
  std::thread([&] {
    ComputeOptions options = OnDevice("cpu", 0);
    options.num_threads = 3;
    SetUpComputeThread(options);
    std::thread([] { at::set_num_threads(1); }).join();
    number = at::get_num_threads();
  }).join();
  EXPECT_EQ(number, 3);
}

}  // namespace
}  // namespace tandem
