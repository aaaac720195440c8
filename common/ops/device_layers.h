// Operations of layers with the project's kernels of a GPU, where HasLayerKernels. Arguments and
// results are those of ops.h. No autograd.
#ifndef TANDEM_COMMON_OPS_DEVICE_LAYERS_H_
#define TANDEM_COMMON_OPS_DEVICE_LAYERS_H_

#include <ATen/core/Tensor.h>

#include "common/kernels/gate_activation.h"

namespace tandem::ops {

// Whether the kernels are there and take numbers like those of `x`.
bool HasLayerKernels(const at::Tensor& x);

at::Tensor DeviceRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps, double offset);
at::Tensor DeviceRotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor DeviceGated(const at::Tensor& gate_up, kernels::GateActivation activation);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_DEVICE_LAYERS_H_
