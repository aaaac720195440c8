// The streams of the simulated GPUs. Operations run at once, on whichever stream; what a late
// stream would show is checked instead:
//
//   operations of two streams on the same memory, of which one writes: an event or a
//   synchronisation must order them, or the process ends, whatever would have come first
//   memory that comes back to the stream for which it was allocated: other streams must be done
//   with it, or it must have been recorded for them
//   copies to the host arrive when the host waits for their stream; until then all bits there are
//   set
//   copies from the host read pinned memory until then, and host code that writes there before it
//   ends the process
//
// An operation that one thread of the host has waited for counts as awaited by all of them.
//
// A stream of high priority is a process group's. A group of Gloo waits on the host for the copies
// of what it sends, where one of NCCL waits for nothing, so a wait of the host for such a stream
// orders nothing: what a stream does after its operations has to wait for an event of them.
#ifndef TANDEM_TESTS_GPU_SIMULATED_STREAM_H_
#define TANDEM_TESTS_GPU_SIMULATED_STREAM_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "tests/gpu/simulated/memory.h"

namespace tandem::simulated_gpu {

// Stream 0 of a device is its default one; those of high priority come last.
inline constexpr int kFirstOfHighPriority = 8, kStreamsOfDevice = 16;
inline constexpr int kStreams = kDevices * kStreamsOfDevice;

// The number of a stream among those of all devices.
constexpr int StreamOf(c10::DeviceIndex device, int64_t id) {
  return device * kStreamsOfDevice + static_cast<int>(id);
}
constexpr bool HasHighPriority(int stream) {
  return stream % kStreamsOfDevice >= kFirstOfHighPriority;
}
// The stream of a device on which operations of the calling thread run.
int CurrentStream(c10::DeviceIndex device);
void SetCurrentStream(int stream);

// The number of operations of each stream that are done, or come before something.
using Progress = std::array<int64_t, kStreams>;

struct Event {
  int stream = 0;
  Progress before = {};
  const void* graph = nullptr;  // that was captured (graph.h); nullptr: none
};

// Returns an event behind all that the stream has to do.
Event RecordEvent(int stream);
// Lets later operations of the stream wait for an event.
void WaitForEvent(int stream, const Event& event);
// Whether the host has waited for an event.
bool IsDone(const Event& event);
// Lets the host wait, and counts as a synchronisation.
void Synchronize(const Event& event);
inline void Synchronize(int stream) { Synchronize(RecordEvent(stream)); }
// Lets the host wait for all streams of a device, those of high priority too.
void SynchronizeDevice(c10::DeviceIndex device);

// Bytes of a device from an address on, and whether an operation writes there.
struct Use {
  const void* address;
  bool writes;
  size_t bytes = 0;  // 0: the whole allocation
};

// Adds the uses of a tensor: of its bytes or, if they lie in many pieces, of what is between the
// first and the last one.
void AddUses(const at::Tensor& x, bool writes, std::vector<Use>& uses);

// Adds an operation that uses memory to a stream.
void Enqueue(int stream, const std::vector<Use>& uses);
// Adds an operation to the current stream of the tensors' device, and counts it as a launch.
void Launch(std::initializer_list<at::Tensor> reads, std::initializer_list<at::Tensor> writes);

// Ends the process if the host has not waited for all writes to the memory at an address: another
// process is about to be told of it.
void OnShared(const void* address);

// Tells of memory that is allocated for a stream, is used by another stream, and comes back.
void OnAllocated(const void* address, size_t bytes, int stream);
void OnRecorded(const void* address, int stream);
void OnFreed(const void* address);
// Returns a number of the memory at an address that no other memory has, before or after; 0: there
// is none.
int64_t GenerationOf(const void* address);
// Returns the memory that has an address: its begin and bytes.
std::pair<const void*, size_t> AllocationOf(const void* address);

// Delivers `values` to `to` when the host waits for what the stream has to do now. Both are on the
// host, of one type.
void DeliverLater(int stream, const at::Tensor& to, const at::Tensor& values);
// Expects that `from`, pinned memory of the host, does not change before.
void ReadLater(int stream, const at::Tensor& from);

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_STREAM_H_
