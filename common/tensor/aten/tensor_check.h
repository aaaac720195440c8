// Errors of one tensor of a weight file, which name the file and the tensor.
#ifndef TANDEM_COMMON_TENSOR_ATEN_TENSOR_CHECK_H_
#define TANDEM_COMMON_TENSOR_ATEN_TENSOR_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem {

// Returns INVALID_ARGUMENT "FILE: tensor 'NAME': `problem`".
absl::Status TensorError(const TensorView& view, absl::string_view problem);

// Returns OK if the tensor has this shape and a floating-point type, and a TensorError if not.
absl::Status CheckFloatTensor(const TensorView& view, absl::Span<const int64_t> shape);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_TENSOR_CHECK_H_
