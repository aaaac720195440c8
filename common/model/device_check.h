// The devices on which this process can compute. No torch in this header.
#ifndef TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
#define TANDEM_COMMON_MODEL_DEVICE_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/machine/memory_plan.h"

namespace tandem {

// FAILED_PRECONDITION for "compute.device" where `device` is "cuda" and a rank cannot compute on
// the GPU of index `gpu`. The message tells which of three it is: the build has no CUDA code, this
// machine has no usable device, or too few for its ranks.
absl::Status CheckDevice(const std::string& device, int gpu);

// Fills free.devices[place] and free.device_sizes[place] from a CUDA device of this machine, for
// which CheckDevice is OK: of what is free, the part of one of `ranks`.
absl::Status MeasureDevice(int device_index, int ranks, size_t place, FreeMemory& free);

// Fills free.devices and free.device_sizes for this rank where `device` is "cuda": of its own GPU,
// which `ranks_per_gpu` ranks share, and of the one that a second model has on each of its ranks,
// if that is another one. With `assumed` every GPU has so many bytes, all free, and none is asked.
// Errors of CheckDevice and of ReadRankEnvironment.
absl::Status MeasureDevices(const std::string& device, int ranks_per_gpu,
                            const std::vector<int32_t>& second_devices,
                            const std::optional<int64_t>& assumed, FreeMemory& free);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
