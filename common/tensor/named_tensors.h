// Tensors with the names they have in a Hugging Face checkpoint, in a fixed order.
#ifndef TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
#define TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace tandem {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Called with one tensor after the other; each is valid until it returns.
using TensorVisitor =
    absl::FunctionRef<absl::Status(const std::string& name, const at::Tensor& tensor)>;

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
