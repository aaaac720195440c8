#include "common/tensor/aten/tensor_memory.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <utility>

namespace tandem {

at::Tensor EmptyWithoutMemory(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  // The storage has its size from the start: views are checked against it.
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                             c10::DataPtr(nullptr, options.device()), /*allocator=*/nullptr,
                             /*resizable=*/false);
  at::Tensor flat = at::empty({0}, options);
  return flat.set_(storage, 0, {numel}, {1});
}

bool HasMemory(const at::Tensor& flat) { return flat.storage().data() != nullptr; }

void AllocateMemory(const at::Tensor& flat) {
  if (HasMemory(flat)) return;
  c10::StorageImpl* const storage = flat.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(
      c10::GetAllocator(flat.device().type())->allocate(storage->nbytes()));
}

void FreeMemory(const at::Tensor& flat) {
  flat.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, flat.device()));
}

void SwapMemory(const at::Tensor& a, const at::Tensor& b) {
  c10::StorageImpl* const first = a.storage().unsafeGetStorageImpl();
  c10::StorageImpl* const second = b.storage().unsafeGetStorageImpl();
  TORCH_CHECK(first->nbytes() == second->nbytes() && first->device() == second->device(),
              "memory of ", first->nbytes(), " bytes is swapped with ", second->nbytes());
  c10::DataPtr former = first->set_data_ptr(std::move(second->mutable_data_ptr()));
  second->set_data_ptr_noswap(std::move(former));
}

}  // namespace tandem
