// The work of a simulated GPU. Operations run at once, which nothing outside of the device can see:
// its memory is out of reach. Copies from and to the host are as late as they may be.
//
//   to the host: they arrive at the next synchronisation; until then all bits there are set
//   from the host: they read pinned memory until the next synchronisation, and host code that
//   writes there before it ends the process
#ifndef TANDEM_TESTS_GPU_SIMULATED_STREAM_H_
#define TANDEM_TESTS_GPU_SIMULATED_STREAM_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace tandem::simulated_gpu {

// Delivers `values` to `to` with the next synchronisation of the device. Both are on the host, of
// one type.
void DeliverLater(c10::DeviceIndex device, const at::Tensor& to, const at::Tensor& values);
// Expects that `from`, pinned memory of the host, does not change before the next synchronisation.
void ReadLater(c10::DeviceIndex device, const at::Tensor& from);

// Returns a mark behind all work of the device.
int64_t Mark(c10::DeviceIndex device);
// Whether the work up to a mark is done.
bool IsDone(c10::DeviceIndex device, int64_t mark);
// Waits for the work up to a mark, or for all of it, and counts as a synchronisation.
void Synchronize(c10::DeviceIndex device, int64_t mark = INT64_MAX);

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_STREAM_H_
