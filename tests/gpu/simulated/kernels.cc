#include "tests/gpu/simulated/kernels.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "common/kernels/device_kernels.h"
#include "common/ops/device_kernels.h"
#include "tests/gpu/emulated/cuda_runtime.h"
#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

// The memory that a kernel gets: a copy of each allocation that its arguments point into, between
// pages that nobody may touch. What it reads or writes elsewhere on the device ends the process.
class Fenced {
 public:
  Fenced() = default;
  ~Fenced() {
    for (const auto& [begin, memory] : memory_) emulated::FreeFenced(memory.copy);
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  // Returns the address in a copy for one of the device.
  void* Copy(const void* address) {
    const auto [begin, bytes] = AllocationOf(address);
    const auto [found, is_new] = memory_.try_emplace(begin);
    Memory& memory = found->second;
    if (is_new) {
      KeepForCapture(address);
      // Every second copy ends before its page, the others begin behind it.
      static std::atomic<unsigned> count = 0;
      const size_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      memory = {.copy = static_cast<char*>(emulated::AllocateFenced(aligned, count++ % 2 == 0)),
                .bytes = bytes};
      TORCH_CHECK(memory.copy != nullptr, "the simulated GPU cannot copy memory for a kernel");
      std::memcpy(memory.copy, OnHost(begin), bytes);
    }
    return memory.copy + (static_cast<const char*>(address) - static_cast<const char*>(begin));
  }

  // Takes over what the kernel has written; returns which memory it has read, and where it wrote.
  std::vector<Use> Return() const {
    std::vector<Use> uses;
    for (const auto& [begin, memory] : memory_) {
      void* const host = OnHost(begin);
      const bool writes = std::memcmp(host, memory.copy, memory.bytes) != 0;
      if (writes) std::memcpy(host, memory.copy, memory.bytes);
      uses.push_back({begin, writes});
    }
    return uses;
  }

 private:
  static constexpr size_t kAlignment = 16;  // of the widest access of a kernel
  struct Memory {
    char* copy = nullptr;
    size_t bytes = 0;
  };
  std::map<const void*, Memory> memory_;  // by where an allocation begins
};

// Returns the arguments with the addresses of copies in place of those of a device.
template <typename Args>
Args WithCopies(const Args& args, Fenced& memory) {
  Args moved = args;
  __builtin_clear_padding(&moved);  // which may look like an address
  auto* const bytes = reinterpret_cast<char*>(&moved);
  for (size_t at = 0; at + sizeof(void*) <= sizeof(Args); at += alignof(void*)) {
    void* address = nullptr;
    std::memcpy(&address, bytes + at, sizeof(address));
    if (!IsOfDevice(address)) continue;
    TORCH_CHECK(DeviceOf(address) == CurrentDevice(), "a kernel on GPU ",
                static_cast<int>(CurrentDevice()), " gets memory of GPU ",
                static_cast<int>(DeviceOf(address)));
    address = memory.Copy(address);
    std::memcpy(bytes + at, &address, sizeof(address));
  }
  return moved;
}

// Runs a kernel on a stream of the current device. It writes to the memory that it changes.
template <auto Entry, typename Args>
const char* Run(const Args& args, kernels::DeviceStream stream) {
  ++TheCounts().launches;
  Fenced memory;
  const char* const error = (kernels::kCudaKernels.*Entry)(WithCopies(args, memory), stream);
  Enqueue(StreamOf(CurrentDevice(), reinterpret_cast<intptr_t>(stream)), memory.Return());
  Record([args, stream] {
    Fenced again;
    (kernels::kCudaKernels.*Entry)(WithCopies(args, again), stream);
    again.Return();
  });
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
