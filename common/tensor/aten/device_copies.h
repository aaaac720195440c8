// Copies of numbers of the host on a device. The host does not wait for them.
#ifndef TANDEM_COMMON_TENSOR_ATEN_DEVICE_COPIES_H_
#define TANDEM_COMMON_TENSOR_ATEN_DEVICE_COPIES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem {

// Returns `values`, which is on the CPU, on `device`: itself for the CPU. A GPU copies it from
// pinned memory, in the order of its current stream; from pageable memory the host would wait for
// the work before.
at::Tensor CopyToDevice(const at::Tensor& values, at::Device device);

// The same of [N] int64 and [N] float64.
at::Tensor CopyToDevice(const std::vector<int64_t>& values, at::Device device);
at::Tensor CopyToDevice(const std::vector<double>& values, at::Device device);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_DEVICE_COPIES_H_
