#include "common/model/compute_setup.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <omp.h>

#include <algorithm>

#include "common/base/errors/status_macros.h"
#include "common/base/machine/machine_resources.h"
#include "common/model/device_check.h"
#include "common/ops/ops.h"
#include "common/ops/products/fixed_rows.h"

namespace tandem {
namespace {

at::Device DeviceOf(const ComputeOptions& options) {
  if (options.device != "cuda") return at::kCPU;
  return {at::kCUDA, static_cast<at::DeviceIndex>(options.gpu())};
}

void SelectDevice(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace

void SetUpComputeThread(const ComputeOptions& options) {
  const int cores = std::max(AvailableCores() / options.local_world_size, 1);
  // The first call on a thread takes the number that any thread has set last: it must come before
  // this thread's own, or a helper of one thread leaves the engine with one.
  at::get_num_threads();
  at::set_num_threads(options.num_threads > 0 ? options.num_threads : cores);
  SelectDevice(DeviceOf(options));
}

void ComputeAlone(at::Device device) {
  at::get_num_threads();  // its first call on a thread sets the thread's number
  omp_set_num_threads(1);
  SelectDevice(device);
}

absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckDevice(options.device, options.gpu()));
  SetUpComputeThread(options);
  ops::SetKernelPath(options.kernels == "aten" ? ops::KernelPath::kAten : ops::KernelPath::kAuto);
  ops::SetProductRows(options.product_rows);
  // cuDNN's attention builds a plan on the host for every new number of keys (57 ms a decode step
  // of a 0.5B model on an H100); flash and memory-efficient attention do not.
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setSDPUseFlash(true);
  const auto type = [](const std::string& name) {
    return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
  };
  return Placement{.device = DeviceOf(options),
                   .dtype = type(options.dtype),
                   .weight_dtype = type(options.weight_dtype),
                   .activation_dtype = type(options.activation_dtype)};
}

}  // namespace tandem
