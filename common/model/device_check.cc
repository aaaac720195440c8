#include "common/model/device_check.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/rank_environment.h"
#include "common/tensor/aten/catch_torch_errors.h"

#ifdef TANDEM_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace tandem {
namespace {

absl::Status NoDevice(const std::string& why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "compute.device", why);
}

}  // namespace

absl::Status CheckDevice(const std::string& device, int gpu) {
  if (device != "cuda") return absl::OkStatus();
#ifdef TANDEM_CUDA
  try {
    c10::cuda::device_count_ensure_non_zero();
  } catch (const c10::Error& error) {
    return NoDevice(absl::StrCat("this machine has no usable CUDA device (",
                                 error.what_without_backtrace(),
                                 "): see `nvidia-smi`; a container needs access to the GPUs"));
  }
#else
  if (!at::hasCUDA()) {
    return NoDevice(
        "this build has no CUDA code: build with `make build PRESET=cuda`, or use an image whose "
        "name ends in -cuda");
  }
#endif
  const int count = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
  if (gpu < count) return absl::OkStatus();
  return NoDevice(absl::StrCat("this machine has ", count, " CUDA devices, none of index ", gpu,
                               ": start fewer ranks here, or set compute.ranks_per_gpu"));
}

absl::Status MeasureDevice(int device_index, int ranks, size_t place, FreeMemory& free) {
  return CatchTorchErrors("compute.device: free memory", [&]() -> absl::Status {
    at::globalContext().lazyInitDevice(at::kCUDA);
    const auto [free_bytes, size] = at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(
        static_cast<at::DeviceIndex>(device_index));
    free.devices[place] = static_cast<int64_t>(free_bytes) / ranks;
    free.device_sizes[place] = static_cast<int64_t>(size);
    return absl::OkStatus();
  });
}

absl::Status MeasureDevices(const std::string& device, int ranks_per_gpu,
                            const std::vector<int32_t>& second_devices,
                            const std::optional<int64_t>& assumed, FreeMemory& free) {
  if (device != "cuda") return absl::OkStatus();
  if (assumed.has_value()) {
    free.devices = {*assumed / ranks_per_gpu, *assumed};
    free.device_sizes.fill(assumed);
    return absl::OkStatus();
  }
  TANDEM_ASSIGN_OR_RETURN(const RankEnvironment environment, ReadRankEnvironment());
  const int gpu = environment.local_rank / ranks_per_gpu;
  TANDEM_RETURN_IF_ERROR(CheckDevice(device, gpu));
  TANDEM_RETURN_IF_ERROR(MeasureDevice(gpu, ranks_per_gpu, /*place=*/0, free));
  const auto rank = static_cast<size_t>(environment.rank);
  if (rank >= second_devices.size() || second_devices[rank] == gpu) return absl::OkStatus();
  return MeasureDevice(second_devices[rank], /*ranks=*/1, /*place=*/1, free);
}

}  // namespace tandem
