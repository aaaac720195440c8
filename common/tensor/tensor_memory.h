// Tensors whose memory comes and goes while they, and all views of them, stay the same objects: for
// parameters of which a process holds only some at a time.
#ifndef TANDEM_COMMON_TENSOR_TENSOR_MEMORY_H_
#define TANDEM_COMMON_TENSOR_TENSOR_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tandem {

// [numel], without memory.
at::Tensor EmptyWithoutMemory(int64_t numel, const at::TensorOptions& options);

bool HasMemory(const at::Tensor& flat);
// Gives a tensor that fills its storage fresh memory, uninitialised, if it has none.
void AllocateMemory(const at::Tensor& flat);
// Gives the memory back. Until there is new one no view of `flat` may be read: there is nothing at
// its address, which is null.
void FreeMemory(const at::Tensor& flat);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_TENSOR_MEMORY_H_
