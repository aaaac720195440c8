// The devices on which this process can compute. No torch in this header.
#ifndef TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
#define TANDEM_COMMON_MODEL_DEVICE_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/machine/memory_plan.h"

namespace tandem {

// FAILED_PRECONDITION for "compute.device" where `device` is "cuda" and a rank cannot compute on
// it. The message tells which of three it is: the build has no CUDA code, this machine has no
// usable device, or it has fewer devices than ranks.
absl::Status CheckDevice(const std::string& device, int local_rank);

// Fills free.devices[place] and free.device_sizes[place] from a CUDA device of this machine, for
// which CheckDevice is OK.
absl::Status MeasureDevice(int device_index, size_t place, FreeMemory& free);

// Fills free.devices and free.device_sizes for this rank where `device` is "cuda": of its own GPU,
// and of the one that a second model has on each of its ranks, if that is another one. Errors of
// CheckDevice and of ReadRankEnvironment.
absl::Status MeasureDevices(const std::string& device, const std::vector<int32_t>& second_devices,
                            FreeMemory& free);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
