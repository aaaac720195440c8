#include "common/model/compute_setup.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "common/base/error.h"
#include "common/base/physical_cores.h"
#include "common/ops/ops.h"

namespace tandem {

void SetComputeThreads(const ComputeOptions& options) {
  at::set_num_threads(options.num_threads > 0 ? options.num_threads : PhysicalCores());
}

absl::StatusOr<Placement> SetUpCompute(const ComputeOptions& options) {
  SetComputeThreads(options);
  ops::SetKernelPath(options.kernels == "aten" ? ops::KernelPath::kAten : ops::KernelPath::kAuto);
  const bool cuda = options.device == "cuda";
  if (cuda && !at::hasCUDA()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "compute.device",
                      "this machine or this build has no CUDA device");
  }
  return Placement{.device = cuda ? at::kCUDA : at::kCPU,
                   .dtype = options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat};
}

}  // namespace tandem
