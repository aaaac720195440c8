#include "common/tensor/aten/tensor_copies.h"

#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "common/base/errors/status_macros.h"

namespace tandem {

absl::Status TensorCopies::Add(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor copy =
      at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()));
  copies_.emplace_back(name, copy);
  if (tensor.is_cpu()) {
    copy.copy_(tensor.detach());
    return absl::OkStatus();
  }
  // A device's values come part by part.
  return from_device_.Add(
      tensor, tensor.scalar_type(),
      [rest = std::make_shared<at::Tensor>(copy.view(-1))](const at::Tensor& values) {
        rest->narrow(0, 0, values.numel()).copy_(values);
        *rest = rest->narrow(0, values.numel(), rest->numel() - values.numel());
        return absl::OkStatus();
      });
}

void TensorCopies::AddUnchanging(const std::string& name, const at::Tensor& tensor) {
  copies_.emplace_back(name, tensor.detach());
}

absl::StatusOr<NamedTensors> TensorCopies::Take() && {
  TANDEM_RETURN_IF_ERROR(from_device_.Finish());
  return std::move(copies_);
}

}  // namespace tandem
