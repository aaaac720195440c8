#include "common/tensor/aten/peer_memory.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstddef>
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

GpuMemory Describe(const at::Tensor& bytes) {
  // Their handles are descriptors, of which a process has few, in place of those of CUDA IPC.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(),
      "memory of expandable segments is not shared");
  // A handle of CUDA opens the whole segment of the allocator in which the tensor is.
  c10::cuda::CUDACachingAllocator::ShareableHandle shared =
      c10::cuda::CUDACachingAllocator::shareIpcHandle(bytes.storage().mutable_data());
  return {
      .gpu = GpuUuid(bytes.device()), .handle = std::move(shared.handle), .offset = shared.offset};
}

// A GPU that this process does not see (CUDA_VISIBLE_DEVICES) can be opened nevertheless.
absl::Status CheckAccess(const GpuMemory& shared, c10::Device device) {
  for (c10::DeviceIndex gpu = 0; gpu < c10::cuda::device_count(); ++gpu) {
    if (GpuUuid({c10::kCUDA, gpu}) != shared.gpu || gpu == device.index()) continue;
    if (at::cuda::canDeviceAccessPeer(device.index(), gpu)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", device.index(), " has no access to the memory of GPU ", gpu));
  }
  return absl::OkStatus();
}

class Segment {
 public:
  explicit Segment(const GpuMemory& shared)
      : segment_(c10::cuda::CUDACachingAllocator::getIpcDevPtr(shared.handle)),
        begin_(static_cast<const char*>(segment_.get()) + shared.offset) {}

  void Copy(int64_t offset, const at::Tensor& bytes) const {
    C10_CUDA_CHECK(cudaMemcpyAsync(bytes.mutable_data_ptr(), begin_ + offset, bytes.nbytes(),
                                   cudaMemcpyDeviceToDevice,
                                   c10::cuda::getCurrentCUDAStream(bytes.device().index())));
  }

 private:
  const std::shared_ptr<void> segment_;  // its end closes the handle
  const char* const begin_;
};

#else

GpuMemory Describe(const at::Tensor& bytes) {
  const auto address = reinterpret_cast<int64_t>(bytes.storage().data());
  return {.gpu = GpuUuid(bytes.device()),
          .handle = CallOperator<std::string, int64_t>("tandem_peer::share", address)};
}

absl::Status CheckAccess(const GpuMemory&, c10::Device) { return absl::OkStatus(); }

class Segment {
 public:
  explicit Segment(const GpuMemory& shared)
      : memory_(CallOperator<int64_t, std::string>("tandem_peer::open", shared.handle)),
        begin_(shared.offset) {}
  ~Segment() { CallOperator<void, int64_t>("tandem_peer::close", memory_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  void Copy(int64_t offset, const at::Tensor& bytes) const {
    CallOperator<void, int64_t, int64_t, int64_t, int64_t>(
        "tandem_peer::copy", memory_, begin_ + offset,
        reinterpret_cast<int64_t>(bytes.mutable_data_ptr()), static_cast<int64_t>(bytes.nbytes()));
  }

 private:
  const int64_t memory_, begin_;
};

#endif

class Opened final : public PeerMemory {
 public:
  Opened(absl::Span<const GpuMemory> memories, c10::Device device)
      : PeerMemory({memories.begin(), memories.end()}, device) {
    for (const GpuMemory& memory : memories) {
      segments_.push_back(std::make_unique<const Segment>(memory));
    }
  }

 private:
  void Copy(int64_t offset, const at::Tensor& bytes) const override {
    int64_t copied = 0;
    for (size_t i = 0; copied < bytes.numel(); ++i) {
      const int64_t count = std::min(bytes.numel() - copied, shared()[i].size - offset);
      if (count > 0) segments_[i]->Copy(offset, bytes.narrow(0, copied, count));
      copied += std::max<int64_t>(count, 0);
      offset = std::max<int64_t>(offset - shared()[i].size, 0);
    }
  }

  std::vector<std::unique_ptr<const Segment>> segments_;
};

absl::Status CheckPlace(const GpuMemory& shared) {
  if (shared.machine.empty() || shared.machine != MachineId()) {
    return absl::FailedPreconditionError("the memory is another machine's");
  }
  if (shared.offset < 0 || shared.size < 0 ||
      shared.size > std::numeric_limits<int64_t>::max() - shared.offset) {
    return absl::InvalidArgumentError("offset and size must not be negative, nor overflow");
  }
  return absl::OkStatus();
}

int64_t SizeOf(absl::Span<const GpuMemory> memories) {
  int64_t size = 0;
  for (const GpuMemory& memory : memories) size += memory.size;
  return size;
}

}  // namespace

std::string GpuUuid(c10::Device device) {
#ifdef TANDEM_CUDA
  const cudaUUID_t& uuid = at::cuda::getDeviceProperties(device.index())->uuid;
  return absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
#else
  return absl::StrCat("simulated-", device.index());
#endif
}

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

PeerMemory::PeerMemory(std::vector<GpuMemory> shared, c10::Device device)
    : shared_(std::move(shared)), device_(device), size_(SizeOf(shared_)) {}

absl::StatusOr<std::shared_ptr<const PeerMemory>> PeerMemory::Open(
    absl::Span<const GpuMemory> shared, c10::Device device) {
  if (!CanShareMemory(device)) return absl::UnimplementedError("no memory can be opened");
  for (const GpuMemory& memory : shared) TANDEM_RETURN_IF_ERROR(CheckPlace(memory));
  return CatchTorchErrors("shared memory",
                          [&]() -> absl::StatusOr<std::shared_ptr<const PeerMemory>> {
                            const c10::DeviceGuard guard(device);
                            for (const GpuMemory& memory : shared)
                              TANDEM_RETURN_IF_ERROR(CheckAccess(memory, device));
                            return std::make_shared<const Opened>(shared, device);
                          });
}

absl::Status PeerMemory::CopyTo(int64_t offset, const at::Tensor& bytes) const {
  if (offset < 0 || bytes.numel() > size_ - offset) {
    return absl::DataLossError(absl::StrCat("the shared memory ends at byte ", size_,
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
