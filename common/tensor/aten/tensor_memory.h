// Allocation and release of a tensor's memory while the tensor and its views stay the same objects:
// for parameters that a process holds one block at a time, or that change at once.
#ifndef TANDEM_COMMON_TENSOR_ATEN_TENSOR_MEMORY_H_
#define TANDEM_COMMON_TENSOR_ATEN_TENSOR_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem {

// Returns a tensor of shape [numel] without memory.
at::Tensor EmptyWithoutMemory(int64_t numel, const at::TensorOptions& options);

bool HasMemory(const at::Tensor& flat);
// Allocates uninitialised memory for a tensor that fills its storage, unless it has memory.
void AllocateMemory(const at::Tensor& flat);
// Releases the memory. Until it is allocated again no view of `flat` may be read: their address is
// null.
void FreeMemory(const at::Tensor& flat);
// Exchanges the memory of two tensors that fill storages of the same size and device; their views
// follow. No value is read.
void SwapMemory(const at::Tensor& a, const at::Tensor& b);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_TENSOR_MEMORY_H_
