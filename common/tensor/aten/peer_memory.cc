#include "common/tensor/aten/peer_memory.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/catch_torch_errors.h"

#ifdef TANDEM_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#else
#include "common/tensor/aten/device_operators.h"
#endif

namespace tandem {
namespace {

#ifdef TANDEM_CUDA

std::string UuidOf(c10::DeviceIndex device) {
  const cudaUUID_t& uuid = at::cuda::getDeviceProperties(device)->uuid;
  return absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
}

GpuMemory Describe(const at::Tensor& bytes) {
  // Their handles are descriptors, of which a process has few, in place of those of CUDA IPC.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(),
      "memory of expandable segments is not shared");
  // A handle of CUDA opens the whole segment of the allocator in which the tensor is.
  c10::cuda::CUDACachingAllocator::ShareableHandle shared =
      c10::cuda::CUDACachingAllocator::shareIpcHandle(bytes.storage().mutable_data());
  return {.gpu = UuidOf(bytes.device().index()),
          .handle = std::move(shared.handle),
          .offset = shared.offset};
}

// A GPU that this process does not see (CUDA_VISIBLE_DEVICES) can be opened nevertheless.
absl::Status CheckAccess(const GpuMemory& shared, c10::Device device) {
  for (c10::DeviceIndex gpu = 0; gpu < c10::cuda::device_count(); ++gpu) {
    if (UuidOf(gpu) != shared.gpu || gpu == device.index()) continue;
    if (at::cuda::canDeviceAccessPeer(device.index(), gpu)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", device.index(), " has no access to the memory of GPU ", gpu));
  }
  return absl::OkStatus();
}

class Opened final : public PeerMemory {
 public:
  Opened(const GpuMemory& shared, c10::Device device)
      : PeerMemory(shared, device),
        segment_(c10::cuda::CUDACachingAllocator::getIpcDevPtr(shared.handle)),
        begin_(static_cast<const char*>(segment_.get()) + shared.offset) {}

 private:
  void Copy(int64_t offset, const at::Tensor& bytes) const override {
    C10_CUDA_CHECK(cudaMemcpyAsync(bytes.mutable_data_ptr(), begin_ + offset, bytes.nbytes(),
                                   cudaMemcpyDeviceToDevice,
                                   c10::cuda::getCurrentCUDAStream(bytes.device().index())));
  }

  const std::shared_ptr<void> segment_;  // its end closes the handle
  const char* const begin_;
};

#else

GpuMemory Describe(const at::Tensor& bytes) {
  const auto address = reinterpret_cast<int64_t>(bytes.storage().data());
  return {.gpu = absl::StrCat("simulated-", bytes.device().index()),
          .handle = CallOperator<std::string, int64_t>("tandem_peer::share", address)};
}

absl::Status CheckAccess(const GpuMemory&, c10::Device) { return absl::OkStatus(); }

class Opened final : public PeerMemory {
 public:
  Opened(const GpuMemory& shared, c10::Device device)
      : PeerMemory(shared, device),
        memory_(CallOperator<int64_t, std::string>("tandem_peer::open", shared.handle)),
        begin_(shared.offset) {}
  ~Opened() override { CallOperator<void, int64_t>("tandem_peer::close", memory_); }

 private:
  void Copy(int64_t offset, const at::Tensor& bytes) const override {
    CallOperator<void, int64_t, int64_t, int64_t, int64_t>(
        "tandem_peer::copy", memory_, begin_ + offset,
        reinterpret_cast<int64_t>(bytes.mutable_data_ptr()), static_cast<int64_t>(bytes.nbytes()));
  }

  const int64_t memory_, begin_;
};

#endif

}  // namespace

bool CanShareMemory(c10::Device device) {
#ifdef TANDEM_CUDA
  return device.is_cuda();
#else
  return device.is_cuda() && HasOperator("tandem_peer::share");
#endif
}

absl::StatusOr<GpuMemory> ShareMemory(const at::Tensor& bytes) {
  if (!CanShareMemory(bytes.device())) return absl::UnimplementedError("no memory can be shared");
  return CatchTorchErrors("shared memory", [&]() -> absl::StatusOr<GpuMemory> {
    const c10::DeviceGuard guard(bytes.device());
    GpuMemory shared = Describe(bytes);
    shared.machine = MachineId();
    shared.size = bytes.numel();
    return shared;
  });
}

absl::StatusOr<std::shared_ptr<const PeerMemory>> PeerMemory::Open(const GpuMemory& shared,
                                                                   c10::Device device) {
  if (!CanShareMemory(device)) return absl::UnimplementedError("no memory can be opened");
  if (shared.machine.empty() || shared.machine != MachineId()) {
    return absl::FailedPreconditionError("the memory is another machine's");
  }
  if (shared.offset < 0 || shared.size < 0 ||
      shared.size > std::numeric_limits<int64_t>::max() - shared.offset) {
    return absl::InvalidArgumentError("offset and size must not be negative, nor overflow");
  }
  return CatchTorchErrors("shared memory",
                          [&]() -> absl::StatusOr<std::shared_ptr<const PeerMemory>> {
                            const c10::DeviceGuard guard(device);
                            TANDEM_RETURN_IF_ERROR(CheckAccess(shared, device));
                            return std::make_shared<const Opened>(shared, device);
                          });
}

absl::Status PeerMemory::CopyTo(int64_t offset, const at::Tensor& bytes) const {
  if (offset < 0 || bytes.numel() > shared_.size - offset) {
    return absl::DataLossError(absl::StrCat("the shared memory ends at byte ", shared_.size,
                                            ": there are no ", bytes.numel(), " at ", offset));
  }
  if (bytes.numel() > 0) Copy(offset, bytes);
  return absl::OkStatus();
}

absl::Status PeerMemory::Read(int64_t offset, absl::Span<std::byte> out) const {
  return CatchTorchErrors("shared memory", [&]() -> absl::Status {
    const c10::DeviceGuard guard(device_);
    const auto size = static_cast<int64_t>(out.size());
    const at::Tensor bytes = at::empty({size}, at::device(device_).dtype(at::kByte));
    TANDEM_RETURN_IF_ERROR(CopyTo(offset, bytes));
    at::from_blob(out.data(), {size}, at::dtype(at::kByte)).copy_(bytes);
    return absl::OkStatus();
  });
}

}  // namespace tandem
