// Applies the section `compute` of a configuration.
#ifndef TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
#define TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_

#include <c10/core/Device.h>

#include "absl/status/statusor.h"
#include "common/model/config/compute_options.h"
#include "common/model/parameters/parameter.h"

namespace tandem {

// Sets what the calling thread computes with from now on: its number of threads, and on a GPU the
// rank's device. Every thread that runs operations calls it or ComputeAlone; a thread that does not
// has device 0, on which each rank would then take memory.
void SetUpComputeThread(const ComputeOptions& options);

// Makes the calling thread compute on `device`, without other threads, from now on, so that it can
// work beside the one that serves. Own kernels that divide their work say so themselves
// (ops::PackThreads).
void ComputeAlone(at::Device device);

// Sets up the calling thread, and the kernels of the process, and returns the placement of models.
// The thread that loads them calls it before its first operation. FAILED_PRECONDITION for
// "compute.device" without such a device (CheckDevice).
absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
