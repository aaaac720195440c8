// From configured options to where models live.
#ifndef TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
#define TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_

#include "absl/status/statusor.h"
#include "common/model/compute_options.h"
#include "common/model/parameter.h"

namespace tandem {

// The threads of what the calling thread computes from now on.
void SetComputeThreads(const ComputeOptions& options);

// Sets the threads of the calling thread and the kernels of the process, and says where the models
// go. For the thread that loads them, before its first operation; if another one computes, it calls
// SetComputeThreads itself. FAILED_PRECONDITION for "compute.device" where there is no such device.
absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
