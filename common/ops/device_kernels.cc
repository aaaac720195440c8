#include "common/ops/device_kernels.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "common/ops/ops.h"

namespace tandem::ops {

const kernels::DeviceKernels& DeviceKernelsOf([[maybe_unused]] c10::Device device) {
  static constexpr kernels::DeviceKernels kNone;
  if (GetKernelPath() == KernelPath::kAten) return kNone;
#ifdef TANDEM_CUDA
  if (device.is_cuda()) return kernels::kCudaKernels;
#endif
  return kNone;
}

kernels::DeviceStream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void CheckLaunch(const char* what, const char* error) {
  TORCH_CHECK(error == nullptr, "kernel of the ", what, ": ", error);
}

}  // namespace tandem::ops
