// Tensors with the names they have in a Hugging Face checkpoint, in a fixed order.
#ifndef TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
#define TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/base/status_macros.h"

namespace tandem {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Called with one tensor after the other; each is valid until it returns.
using TensorVisitor =
    absl::FunctionRef<absl::Status(const std::string& name, const at::Tensor& tensor)>;

// Calls a visitor with each of a set of tensors; the visitor's first error ends it and is returned.
// To be called once.
using TensorSource = absl::FunctionRef<absl::Status(TensorVisitor visit)>;

// The source of tensors that are all there.
inline auto SourceOf(const NamedTensors& tensors) {
  return [&tensors](TensorVisitor visit) -> absl::Status {
    for (const auto& [name, tensor] : tensors) TANDEM_RETURN_IF_ERROR(visit(name, tensor));
    return absl::OkStatus();
  };
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
