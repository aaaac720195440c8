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

// Returns the bytes of one element.
size_t ItemSizeBytes(DType dtype);

// Returns the name in safetensors files: "F32", "BF16", "I64", "BOOL", ...
absl::string_view DTypeName(DType dtype);

// Returns the name in Hugging Face configs: "float32", "bfloat16", ...
absl::string_view TorchDTypeName(DType dtype);

// The inverse of DTypeName; nullopt for an unsupported name.
std::optional<DType> ParseDType(absl::string_view name);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_DTYPE_H_
