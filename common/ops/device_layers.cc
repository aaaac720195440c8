#include "common/ops/device_layers.h"

#include <ATen/ATen.h>

#include <cstdint>

#include "common/ops/device_kernels.h"
#include "common/ops/packed.h"

namespace tandem::ops {
namespace {

bool IsBfloat16(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16; }

}  // namespace

bool HasLayerKernels(const at::Tensor& x) {
  return DeviceKernelsOf(x.device()).rms_norm != nullptr &&
         (IsBfloat16(x) || x.scalar_type() == at::kFloat);
}

at::Tensor DeviceRmsNorm(const at::Tensor& x_in, const at::Tensor& weight, double eps,
                         double offset) {
  const at::Tensor x = Packed(x_in), factors = weight.to(x_in.scalar_type()).contiguous();
  const bool has_heads = x.dim() == 3;
  at::Tensor y = at::empty(x.sizes(), x.options());
  Launch("RMSNorm", x.device(), DeviceKernelsOf(x.device()).rms_norm,
         {.x = x.const_data_ptr(),
          .row_stride = x.stride(0),
          .head_stride = has_heads ? x.stride(1) : 0,
          .weight = factors.const_data_ptr(),
          .y = y.mutable_data_ptr(),
          .rows = x.size(0),
          .heads = has_heads ? x.size(1) : 1,
          .width = x.size(-1),
          .eps = static_cast<float>(eps),
          .offset = static_cast<float>(offset),
          .bfloat16 = IsBfloat16(x)});
  return y;
}

at::Tensor DeviceRotary(const at::Tensor& x_in, const at::Tensor& cos_in,
                        const at::Tensor& sin_in) {
  const at::Tensor x = HeadsPacked(x_in);
  const at::Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  Launch("rotary embedding", x.device(), DeviceKernelsOf(x.device()).rotary,
         {.x = x.const_data_ptr(),
          .row_stride = x.stride(0),
          .cos = cos.const_data_ptr<float>(),
          .sin = sin.const_data_ptr<float>(),
          .y = y.mutable_data_ptr(),
          .rows = x.size(0),
          .heads = x.size(1),
          .head_dim = x.size(2),
          .rotated = 2 * cos.size(1),
          .bfloat16 = IsBfloat16(x)});
  return y;
}

at::Tensor DeviceGated(const at::Tensor& gate_up_in, kernels::GateActivation activation) {
  const at::Tensor gate_up = Packed(gate_up_in);
  const int64_t width = gate_up.size(1) / 2;
  at::Tensor y = at::empty({gate_up.size(0), width}, gate_up.options());
  Launch("gate", gate_up.device(), DeviceKernelsOf(gate_up.device()).gated,
         {.gate_up = gate_up.const_data_ptr(),
          .row_stride = gate_up.stride(0),
          .y = y.mutable_data_ptr(),
          .rows = gate_up.size(0),
          .width = width,
          .activation = activation,
          .bfloat16 = IsBfloat16(gate_up)});
  return y;
}

}  // namespace tandem::ops
