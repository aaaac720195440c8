// Linear maps with gradients.
#ifndef TANDEM_COMMON_OPS_LINEAR_LINEAR_FUNCTION_H_
#define TANDEM_COMMON_OPS_LINEAR_LINEAR_FUNCTION_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/ops/products/packed_weight.h"

namespace tandem::ops {

// Returns x weight^T + bias [T, sum of outs] for several maps of one input x [T, in]. `weight`
// [sum of outs, in] and `bias` [sum of outs] (or undefined) are the stacked maps in x's type; or x
// and bias are float32 and the weight bf16, for maps that round their inputs (LinearWeight).
// Gradients, in float32, flow into the `masters` [outs[i], in] and `bias_masters` (empty, or
// [outs[i]]), the parameters that were stacked or copied. The forward pass has the bits of
// inference; gradients do not depend on the number of threads.
at::Tensor DifferentiableLinear(const at::Tensor& x, at::TensorList masters,
                                at::TensorList bias_masters, const at::Tensor& weight,
                                const at::Tensor& bias);

// Returns x weight^T + bias [T, out] for maps that do not train, x [T, in] float32 and bias [out]
// or undefined. The gradient, that of x alone, is multiplied from the packed weights
// (PackedWeight::InputGradientInto); nothing else is kept for it.
at::Tensor DifferentiableLinear(const at::Tensor& x,
                                const std::shared_ptr<const PackedWeight>& weight,
                                const at::Tensor& bias);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_LINEAR_FUNCTION_H_
