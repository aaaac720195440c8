// Checks of the simulation on memory that processes share; common/weights/gpu/gpu_transfer_test.cc
// has the rest.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "common/tensor/aten/peer_memory.h"
#include "common/weights/gpu/gpu_copy.h"
#include "common/weights/gpu/gpu_intake.h"
#include "tests/gpu/simulated/counts.h"

namespace tandem::simulated_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor Bytes(int64_t count) { return at::ones({count}, at::device(kGpu).dtype(at::kByte)); }

// Memory that passes for another process's.
class OwnMemory final : public PeerMemory {
 public:
  explicit OwnMemory(const at::Tensor& bytes)
      : PeerMemory({{.size = bytes.numel()}}, kGpu), bytes_(bytes) {}

 private:
  void Copy(int64_t offset, const at::Tensor& bytes) const override {
    bytes.copy_(bytes_.narrow(0, offset, bytes.numel()));
  }

  const at::Tensor bytes_;
};

TEST(PeerDeathTest, MemoryIsSharedOnceItIsWritten) {
  const at::Tensor bytes = Bytes(8);
  EXPECT_DEATH(ShareMemory(bytes).IgnoreError(), "shared while a stream may still write");
  c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
  EXPECT_TRUE(ShareMemory(bytes).ok());
}

TEST(PeerTest, OtherMemoryIsNotOpened) {
  const at::Tensor bytes = Bytes(8);
  c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
  const GpuMemory memory = ShareMemory(bytes).value();
  GpuMemory wrong = memory;
  wrong.machine = "another";
  EXPECT_EQ(PeerMemory::Open({wrong}, kGpu).status().code(), absl::StatusCode::kFailedPrecondition);
  wrong.machine = memory.machine;
  wrong.offset = -1;
  EXPECT_EQ(PeerMemory::Open({wrong}, kGpu).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(PeerMemory::Open({memory}, kGpu).ok()) << "CUDA opens no memory of its own process";
  EXPECT_EQ(PeerMemory::Open({memory}, at::kCPU).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ShareMemory(at::zeros({8}, at::kByte)).status().code(),
            absl::StatusCode::kUnimplemented);
  for (const char* handle : {"1 999 1 1 0 8", "", "x"}) {
    wrong = memory;
    wrong.handle = handle;
    EXPECT_EQ(PeerMemory::Open({wrong}, kGpu).status().code(), absl::StatusCode::kInternal)
        << handle;
  }
}

// Sender and receiver of many tensors wait a few times in all.
TEST(PeerTest, NobodyWaitsForASingleTensor) {
  constexpr int kTensors = 20;
  NamedTensors tensors;
  std::vector<WeightSpec> specs;
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = "w" + std::to_string(10 + i);
    tensors.emplace_back(name, at::arange(5.0, at::device(kGpu).dtype(at::kFloat)) + i);
    specs.push_back({.name = name, .dtype = DType::kBFloat16, .shape = {5}});
  }
  int64_t before = TheCounts().synchronizations;
  const auto copy =
      GpuCopy::Make(specs, {.device = kGpu, .most_bytes = 1000}, /*with_sums=*/true).value();
  ASSERT_TRUE(copy->Fill(SourceOf(tensors)).ok());
  EXPECT_LE(TheCounts().synchronizations - before, 3);
  std::vector<std::byte> bytes(kTensors * 10);
  copy->Read(0, absl::MakeSpan(bytes));
  const auto memory = std::make_shared<const OwnMemory>(
      at::from_blob(bytes.data(), {kTensors * 10}, at::kByte).to(kGpu));
  GpuIntake intake(c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(kGpu));
  std::vector<at::Tensor> taken;
  before = TheCounts().synchronizations;
  for (int i = 0; i < kTensors; ++i) {
    ASSERT_TRUE(intake
                    .Take(specs[i], {{.from = memory, .offset = i * 10, .size = 10}},
                          [&](const at::Tensor& tensor) {
                            taken.push_back(tensor);
                            return absl::OkStatus();
                          })
                    .ok());
  }
  EXPECT_EQ(TheCounts().synchronizations, before);
  const std::vector<ReadTensor> read = intake.TakeRead();
  EXPECT_EQ(TheCounts().synchronizations, before + 1);
  ASSERT_EQ(read.size(), size_t{kTensors});
  for (size_t i = 0; i < kTensors; ++i) {
    EXPECT_EQ(read[i].name, specs[i].name);
    EXPECT_EQ(read[i].sums, copy->sums().sums[i]);
    EXPECT_EQ(read[i].not_finite, std::nullopt);
    EXPECT_TRUE(at::equal(taken[i].cpu(), tensors[i].second.cpu().to(at::kBFloat16)));
  }
  EXPECT_TRUE(intake.TakeRead().empty()) << "each tensor once";
}

}  // namespace
}  // namespace tandem::simulated_gpu
