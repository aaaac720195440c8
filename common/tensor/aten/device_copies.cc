#include "common/tensor/aten/device_copies.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem {
namespace {

at::TensorOptions Host(at::ScalarType type, at::Device device) {
  return at::dtype(type).pinned_memory(!device.is_cpu());
}

template <typename Number>
at::Tensor Copied(const std::vector<Number>& values, at::ScalarType type, at::Device device) {
  const at::Tensor host = at::empty({static_cast<int64_t>(values.size())}, Host(type, device));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<Number>());
  return device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
}

}  // namespace

at::Tensor CopyToDevice(const at::Tensor& values, at::Device device) {
  if (device.is_cpu()) return values;
  const at::Tensor host = at::empty(values.sizes(), Host(values.scalar_type(), device));
  return host.copy_(values).to(device, /*non_blocking=*/true);
}

at::Tensor CopyToDevice(const std::vector<int64_t>& values, at::Device device) {
  return Copied(values, at::kLong, device);
}

at::Tensor CopyToDevice(const std::vector<double>& values, at::Device device) {
  return Copied(values, at::kDouble, device);
}

}  // namespace tandem
