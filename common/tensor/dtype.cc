#include "common/tensor/dtype.h"

#include <array>

namespace tandem {
namespace {

struct Entry {
  DType dtype;
  size_t bytes;
  const char* name;
  const char* torch_name;
};

// In the order of the enum.
constexpr std::array<Entry, 10> kEntries = {{
    {DType::kFloat64, 8, "F64", "float64"},
    {DType::kFloat32, 4, "F32", "float32"},
    {DType::kBFloat16, 2, "BF16", "bfloat16"},
    {DType::kFloat16, 2, "F16", "float16"},
    {DType::kInt64, 8, "I64", "int64"},
    {DType::kInt32, 4, "I32", "int32"},
    {DType::kInt16, 2, "I16", "int16"},
    {DType::kInt8, 1, "I8", "int8"},
    {DType::kUInt8, 1, "U8", "uint8"},
    {DType::kBool, 1, "BOOL", "bool"},
}};

const Entry& Find(DType dtype) { return kEntries[static_cast<size_t>(dtype)]; }

}  // namespace

size_t ItemSizeBytes(DType dtype) { return Find(dtype).bytes; }
absl::string_view DTypeName(DType dtype) { return Find(dtype).name; }
absl::string_view TorchDTypeName(DType dtype) { return Find(dtype).torch_name; }

std::optional<DType> ParseDType(absl::string_view name) {
  for (const Entry& entry : kEntries) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

}  // namespace tandem
