// Tensors with the names they have in a Hugging Face checkpoint, in a fixed order.
#ifndef TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
#define TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace tandem {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_NAMED_TENSORS_H_
