#include "common/ops/device_kernels.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "common/ops/ops.h"

namespace tandem::ops {

namespace {

constexpr kernels::DeviceKernels kNone;
#ifdef TANDEM_CUDA
constexpr const kernels::DeviceKernels& kOfBuild = kernels::kCudaKernels;
#else
constexpr const kernels::DeviceKernels& kOfBuild = kNone;
#endif
constinit const kernels::DeviceKernels* substitute = nullptr;

}  // namespace

const kernels::DeviceKernels& DeviceKernelsOf(c10::Device device) {
  if (!device.is_cuda() || GetKernelPath() == KernelPath::kAten) return kNone;
  return substitute != nullptr ? *substitute : kOfBuild;
}

void SubstituteDeviceKernels(const kernels::DeviceKernels* kernels) { substitute = kernels; }

kernels::DeviceStream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void CheckLaunch(const char* what, const char* error) {
  TORCH_CHECK(error == nullptr, "kernel of the ", what, ": ", error);
}

}  // namespace tandem::ops
