#include "tests/gpu/simulated/kernels.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>

#include "common/kernels/device_kernels.h"
#include "common/ops/device_kernels.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::simulated_gpu {
namespace {

// Returns the arguments with the addresses at which the simulation has the bytes of a device.
template <typename Args>
Args OnHostOf(const Args& args) {
  Args moved = args;
  auto* const bytes = reinterpret_cast<char*>(&moved);
  for (size_t at = 0; at + sizeof(void*) <= sizeof(Args); at += alignof(void*)) {
    void* address = nullptr;
    std::memcpy(&address, bytes + at, sizeof(address));
    if (!IsOfDevice(address)) continue;
    TORCH_CHECK(DeviceOf(address) == CurrentDevice(), "a kernel on GPU ",
                static_cast<int>(CurrentDevice()), " gets memory of GPU ",
                static_cast<int>(DeviceOf(address)));
    address = OnHost(address);
    std::memcpy(bytes + at, &address, sizeof(address));
  }
  return moved;
}

template <auto Entry, typename Args>
const char* Run(const Args& args, kernels::DeviceStream stream) {
  ++TheCounts().launches;
  return (kernels::kCudaKernels.*Entry)(OnHostOf(args), stream);
}

using kernels::DeviceKernels;
constexpr DeviceKernels kKernels = {
    .rms_norm = Run<&DeviceKernels::rms_norm, kernels::DeviceRmsNormArgs>,
    .rotary = Run<&DeviceKernels::rotary, kernels::DeviceRotaryArgs>,
    .gated = Run<&DeviceKernels::gated, kernels::DeviceGatedArgs>,
    .grouped_linear = Run<&DeviceKernels::grouped_linear, kernels::DeviceGroupedLinearArgs>,
    .grouped_gradient = Run<&DeviceKernels::grouped_gradient, kernels::DeviceGroupedGradientArgs>,
    .cache_write = Run<&DeviceKernels::cache_write, kernels::DeviceCacheWriteArgs>,
    .paged_attention = Run<&DeviceKernels::paged_attention, kernels::DevicePagedAttentionArgs>,
    .fold_partials = Run<&DeviceKernels::fold_partials, kernels::DevicePagedAttentionArgs>,
    .logit_statistics = Run<&DeviceKernels::logit_statistics, kernels::DeviceLogitStatisticsArgs>,
    .logit_gradient = Run<&DeviceKernels::logit_gradient, kernels::DeviceLogitGradientArgs>,
    .has_grouped_mm = [](int device) { return kernels::kCudaKernels.has_grouped_mm(device); }};

}  // namespace

WithKernels::WithKernels() { ops::SubstituteDeviceKernels(&kKernels); }
WithKernels::~WithKernels() { ops::SubstituteDeviceKernels(nullptr); }

}  // namespace tandem::simulated_gpu
