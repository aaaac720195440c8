// Tensors with the names they have in a Hugging Face checkpoint, in a fixed order.
#ifndef TANDEM_COMMON_TENSOR_ATEN_NAMED_TENSORS_H_
#define TANDEM_COMMON_TENSOR_ATEN_NAMED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/base/errors/status_macros.h"

namespace tandem {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Called with one tensor after the other; a tensor is valid during the call.
using TensorVisitor =
    absl::FunctionRef<absl::Status(const std::string& name, const at::Tensor& tensor)>;

// Calls a visitor with each of a set of tensors. The visitor's first error ends the visit and is
// returned. A source is called once.
using TensorSource = absl::FunctionRef<absl::Status(TensorVisitor visit)>;

// Returns a source of tensors that are in memory.
inline auto SourceOf(const NamedTensors& tensors) {
  return [&tensors](TensorVisitor visit) -> absl::Status {
    for (const auto& [name, tensor] : tensors) TANDEM_RETURN_IF_ERROR(visit(name, tensor));
    return absl::OkStatus();
  };
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_NAMED_TENSORS_H_
