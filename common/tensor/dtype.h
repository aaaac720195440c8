// Element types of tensors on disk and on the wire. No torch here: aten_bytes.h maps them to ATen.
#ifndef TANDEM_COMMON_TENSOR_DTYPE_H_
#define TANDEM_COMMON_TENSOR_DTYPE_H_

#include <cstddef>
#include <optional>

#include "absl/strings/string_view.h"

namespace tandem {

enum class DType {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
};

// Bytes of one element.
size_t ItemSizeBytes(DType dtype);

// The name safetensors uses: "F32", "BF16", "I64", "BOOL", ...
absl::string_view DTypeName(DType dtype);

// The name Hugging Face configs use: "float32", "bfloat16", ...
absl::string_view TorchDTypeName(DType dtype);

// The inverse of DTypeName; nullopt for a name we do not support.
std::optional<DType> ParseDType(absl::string_view name);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_DTYPE_H_
