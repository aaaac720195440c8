// For tests: the operations of ATen in the place of our kernels.
#ifndef TANDEM_COMMON_OPS_TESTING_ATEN_KERNELS_H_
#define TANDEM_COMMON_OPS_TESTING_ATEN_KERNELS_H_

#include "common/ops/ops.h"

namespace tandem::ops {

// Makes the process use ATen during its life, as on a GPU.
class AtenKernels {
 public:
  AtenKernels() { SetKernelPath(KernelPath::kAten); }
  ~AtenKernels() { SetKernelPath(KernelPath::kAuto); }
  AtenKernels(const AtenKernels&) = delete;
  AtenKernels& operator=(const AtenKernels&) = delete;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_TESTING_ATEN_KERNELS_H_
