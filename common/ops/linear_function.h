// Linear maps with gradients.
#ifndef TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_
#define TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_

#include <ATen/core/Tensor.h>

namespace tandem::ops {

// x weight^T + bias [T, sum of outs], for maps of one input x [T, in] that are stacked in `weight`
// [sum of outs, in] and `bias` [sum of outs] (or undefined), both in x's type. Autograd sees the
// `masters` [outs[i], in] and `bias_masters` (empty, or [outs[i]]) of which those are the stack or
// a copy; their gradients are float32. The forward pass has the bits of inference; gradients do not
// depend on the number of threads.
at::Tensor DifferentiableLinear(const at::Tensor& x, at::TensorList masters,
                                at::TensorList bias_masters, const at::Tensor& weight,
                                const at::Tensor& bias);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_FUNCTION_H_
