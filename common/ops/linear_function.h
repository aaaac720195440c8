// The linear map with gradients, on the CPU.
#ifndef TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_
#define TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// x [T, in], weight [out, in], bias [out] or undefined; fp32 on the CPU. The same bits as inference
// in the forward pass, and gradients that do not depend on the number of threads.
at::Tensor DifferentiableLinear(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_
