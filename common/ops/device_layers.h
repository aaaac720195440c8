// Operations of layers with the project's kernels of a GPU, in c10::InferenceMode. Each returns an
// undefined tensor where there is no kernel for its operands, and in other modes: ATen computes
// then, so that a trainer's passes have the same numbers with a gradient and without one. Arguments
// and results are those of ops.h.
#ifndef TANDEM_COMMON_OPS_DEVICE_LAYERS_H_
#define TANDEM_COMMON_OPS_DEVICE_LAYERS_H_

#include <ATen/core/Tensor.h>

#include "common/kernels/gate_activation.h"

namespace tandem::ops {

at::Tensor DeviceRmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps, double offset);
at::Tensor DeviceRotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor DeviceGated(const at::Tensor& gate_up, kernels::GateActivation activation);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_DEVICE_LAYERS_H_
