#include "common/tensor/aten/tensor_copies.h"

#include <ATen/ATen.h>

#include <memory>

#include "common/base/errors/status_macros.h"

namespace tandem {

at::Tensor TensorCopies::Next(const at::Tensor& tensor) {
  if (next_ == memory_.size()) memory_.emplace_back();
  at::Tensor& memory = memory_[next_++];
  if (!memory.defined() || memory.numel() != tensor.numel() ||
      memory.scalar_type() != tensor.scalar_type()) {
    memory = at::Tensor();  // before the new memory is there
    memory = at::empty({tensor.numel()}, at::device(at::kCPU).dtype(tensor.scalar_type()));
  }
  return memory;
}

absl::StatusOr<at::Tensor> TensorCopies::Add(const at::Tensor& tensor) {
  const at::Tensor flat = Next(tensor);
  at::Tensor copy = flat.view(tensor.sizes());
  if (tensor.is_cpu()) {
    copy.copy_(tensor.detach());
    return copy;
  }
  // A device's values come part by part.
  TANDEM_RETURN_IF_ERROR(
      from_device_.Add(tensor, tensor.scalar_type(),
                       [rest = std::make_shared<at::Tensor>(flat)](const at::Tensor& values) {
                         rest->narrow(0, 0, values.numel()).copy_(values);
                         *rest = rest->narrow(0, values.numel(), rest->numel() - values.numel());
                         return absl::OkStatus();
                       }));
  return copy;
}

absl::Status TensorCopies::Finish() {
  TANDEM_RETURN_IF_ERROR(from_device_.Finish());
  memory_.resize(next_);
  return absl::OkStatus();
}

}  // namespace tandem
