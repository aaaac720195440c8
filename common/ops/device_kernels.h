// The lookup of an operation's own kernel for a GPU that holds its tensors. That for the CPU is
// kernels::GetCpuKernels.
#ifndef TANDEM_COMMON_OPS_DEVICE_KERNELS_H_
#define TANDEM_COMMON_OPS_DEVICE_KERNELS_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <type_traits>

#include "common/kernels/device_kernels.h"

namespace tandem::ops {

// Returns the kernels for tensors on `device`. All entries are nullptr for a device for which there
// are none, and after SetKernelPath(KernelPath::kAten).
const kernels::DeviceKernels& DeviceKernelsOf(c10::Device device);

// For tests: `kernels`, which stays, takes the place of those of the build on CUDA devices; nullptr
// ends that.
void SubstituteDeviceKernels(const kernels::DeviceKernels* kernels);

// Returns the stream of torch on which operations of the device run now.
kernels::DeviceStream CurrentStream(c10::Device device);

// Throws c10::Error that names the operation `what`, if `error` is one.
void CheckLaunch(const char* what, const char* error);

// Launches a kernel of the table on the device's current stream, whichever device the thread has
// selected. Throws c10::Error if the launch fails.
template <typename Args>
void Launch(const char* what, c10::Device device, kernels::DeviceKernel<Args> kernel,
            const std::type_identity_t<Args>& args) {
  const c10::DeviceGuard guard(device);
  CheckLaunch(what, kernel(args, CurrentStream(device)));
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_DEVICE_KERNELS_H_
