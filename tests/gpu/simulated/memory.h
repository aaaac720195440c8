// The memory of the simulated GPUs. Nobody can touch the addresses of a device: an access is a
// segmentation fault. The simulation has the bytes elsewhere.
#ifndef TANDEM_TESTS_GPU_SIMULATED_MEMORY_H_
#define TANDEM_TESTS_GPU_SIMULATED_MEMORY_H_

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tandem::simulated_gpu {

inline constexpr c10::DeviceIndex kDevices = 2;
// Every byte of memory that nobody wrote: no number, -1, true.
inline constexpr int kUnwritten = 0xFF;
// The memory of each device.
inline constexpr size_t kMemoryBytes = size_t{8} << 30;

// The device of the calling thread: what cudaSetDevice sets.
c10::DeviceIndex CurrentDevice();
void SetCurrentDevice(c10::DeviceIndex device);

// Returns the address of a byte of a device at which the simulation has it; nullptr for nullptr.
void* OnHost(const void* device_address);

// Whether an address is one of a device, and of which.
bool IsOfDevice(const void* address);
c10::DeviceIndex DeviceOf(const void* device_address);
// Whether the host pinned the memory at an address.
bool IsPinned(const void* address);

// The file in which the bytes of all devices are, which other processes may open (peer.cc), and the
// place of an address of a device in it.
int FileOfMemory();
int64_t PlaceInFile(const void* device_address);

// Lets a device have so many bytes for this process, as if another one had taken the rest; what it
// has beyond them stays. 0: all of kMemoryBytes.
void SetMemoryLimit(c10::DeviceIndex device, size_t bytes);

// Memory of the current device, filled with kUnwritten. Throws
// c10::OutOfMemoryError.
c10::DeviceAllocator& DeviceMemory();
// Memory of the host that copies need not stage.
at::HostAllocator& PinnedMemory();

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_MEMORY_H_
