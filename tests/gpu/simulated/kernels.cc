#include "tests/gpu/simulated/kernels.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "common/kernels/device_kernels.h"
#include "common/ops/device_kernels.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

// Returns the arguments with the addresses at which the simulation has the bytes of a device, after
// seen(address) for each of them.
template <typename Args, typename Seen>
Args OnHostOf(const Args& args, const Seen& seen) {
  Args moved = args;
  auto* const bytes = reinterpret_cast<char*>(&moved);
  for (size_t at = 0; at + sizeof(void*) <= sizeof(Args); at += alignof(void*)) {
    void* address = nullptr;
    std::memcpy(&address, bytes + at, sizeof(address));
    if (!IsOfDevice(address)) continue;
    TORCH_CHECK(DeviceOf(address) == CurrentDevice(), "a kernel on GPU ",
                static_cast<int>(CurrentDevice()), " gets memory of GPU ",
                static_cast<int>(DeviceOf(address)));
    seen(address);
    address = OnHost(address);
    std::memcpy(bytes + at, &address, sizeof(address));
  }
  return moved;
}

// Runs a kernel on a stream of the current device. It writes to the memory that it changes.
template <auto Entry, typename Args>
const char* Run(const Args& args, kernels::DeviceStream stream) {
  ++TheCounts().launches;
  std::map<const void*, std::vector<char>> memory;  // as it was before, by its begin
  const Args moved = OnHostOf(args, [&](const void* address) {
    KeepForCapture(address);
    const auto [begin, bytes] = AllocationOf(address);
    const auto* const host = static_cast<const char*>(OnHost(begin));
    memory.try_emplace(begin, host, host + bytes);
  });
  const char* const error = (kernels::kCudaKernels.*Entry)(moved, stream);
  std::vector<Use> uses;
  for (const auto& [begin, before] : memory) {
    uses.push_back({begin, std::memcmp(OnHost(begin), before.data(), before.size()) != 0});
  }
  Enqueue(StreamOf(CurrentDevice(), reinterpret_cast<intptr_t>(stream)), uses);
  Record([moved, stream] { (kernels::kCudaKernels.*Entry)(moved, stream); });
  return error;
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
