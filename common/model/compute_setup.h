// Applies the section `compute` of a configuration.
#ifndef TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
#define TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_

#include "absl/status/statusor.h"
#include "common/model/compute_options.h"
#include "common/model/parameter.h"

namespace tandem {

// Sets the number of threads with which the calling thread computes from now on.
void SetComputeThreads(const ComputeOptions& options);

// Makes the calling thread compute without other threads from now on, so that it can work beside
// the one that serves. Own kernels that divide their work say so themselves (ops::PackThreads).
void ComputeAlone();

// Sets the threads of the calling thread and the kernels of the process, and returns the placement
// of models. The thread that loads them calls it before its first operation; another thread that
// computes calls SetComputeThreads. FAILED_PRECONDITION for "compute.device" without such a device.
absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_COMPUTE_SETUP_H_
