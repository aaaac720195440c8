#include "common/model/compute_setup.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <omp.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/machine_resources.h"
#include "common/base/status_macros.h"
#include "common/model/device_check.h"
#include "common/ops/ops.h"

namespace tandem {

void SetComputeThreads(const ComputeOptions& options) {
  const int cores = std::max(AvailableCores() / options.local_world_size, 1);
  at::set_num_threads(options.num_threads > 0 ? options.num_threads : cores);
}

void ComputeAlone() {
  at::get_num_threads();  // its first call on a thread sets the thread's number
  omp_set_num_threads(1);
}

absl::Status CheckDevice(const std::string& device) {
  if (device != "cuda" || at::hasCUDA()) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "compute.device",
                    "this machine or this build has no CUDA device");
}

absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options) {
  SetComputeThreads(options);
  ops::SetKernelPath(options.kernels == "aten" ? ops::KernelPath::kAten : ops::KernelPath::kAuto);
  TANDEM_RETURN_IF_ERROR(CheckDevice(options.device));
  const bool cuda = options.device == "cuda";
  at::Device device = at::kCPU;
  if (cuda) {
    device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options.local_rank));
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    if (options.local_rank >= guard.deviceCount()) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "compute.device",
                        absl::StrCat("this machine has ", guard.deviceCount(),
                                     " CUDA devices, none for local rank ", options.local_rank));
    }
    guard.setDevice(device);
  }
  const auto type = [](const std::string& name) {
    return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
  };
  return Placement{
      .device = device, .dtype = type(options.dtype), .weight_dtype = type(options.weight_dtype)};
}

}  // namespace tandem
