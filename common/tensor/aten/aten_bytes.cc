#include "common/tensor/aten/aten_bytes.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/host_copies.h"
#include "common/tensor/safetensors/safetensors_writer.h"

namespace tandem {

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt8:
      return at::kChar;
    case DType::kUInt8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
  }
  return at::ScalarType::Undefined;
}

absl::StatusOr<DType> FromScalarType(at::ScalarType type) {
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt64,
        DType::kInt32, DType::kInt16, DType::kInt8, DType::kUInt8, DType::kBool}) {
    if (ToScalarType(dtype) == type) return dtype;
  }
  return absl::UnimplementedError(absl::StrCat("tensors of type ", c10::toString(type)));
}

at::Tensor ToAten(const TensorView& view) {
  at::Tensor tensor = at::empty(view.shape, at::TensorOptions(ToScalarType(view.dtype)));
  if (view.bytes > 0) std::memcpy(tensor.data_ptr(), view.data, view.bytes);
  return tensor;
}

at::Tensor AliasAsAten(const TensorView& view) {
  if (reinterpret_cast<uintptr_t>(view.data) % ItemSizeBytes(view.dtype) != 0) return ToAten(view);
  return at::from_blob(const_cast<std::byte*>(view.data), view.shape,
                       at::TensorOptions(ToScalarType(view.dtype)));
}

absl::StatusOr<TensorView> AsView(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.is_contiguous()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", name, "': must be a contiguous CPU tensor"));
  }
  TANDEM_ASSIGN_OR_RETURN(const DType dtype, FromScalarType(tensor.scalar_type()));
  TensorView view;
  view.name = name;
  view.dtype = dtype;
  view.shape = tensor.sizes().vec();
  view.data = static_cast<const std::byte*>(tensor.const_data_ptr());
  view.bytes = tensor.nbytes();
  return view;
}

absl::Status WriteTensors(const std::string& path, absl::Span<const WeightSpec> tensors,
                          TensorSource source, const std::map<std::string, std::string>& metadata) {
  TANDEM_ASSIGN_OR_RETURN(const auto writer, SafetensorsWriter::Create(path, tensors, metadata));
  HostCopies copies;
  TANDEM_RETURN_IF_ERROR(
      source([&](const std::string& name, const at::Tensor& tensor) -> absl::Status {
        TANDEM_ASSIGN_OR_RETURN(DType dtype, FromScalarType(tensor.scalar_type()));
        if (const WeightSpec* spec = writer->Find(name); spec != nullptr) dtype = spec->dtype;
        TANDEM_RETURN_IF_ERROR(
            writer->Begin({.name = name, .dtype = dtype, .shape = tensor.sizes().vec()}));
        return copies.Add(tensor, ToScalarType(dtype), [&writer, name](const at::Tensor& values) {
          return writer->Append(
              name, {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
        });
      }));
  TANDEM_RETURN_IF_ERROR(copies.Finish());
  return writer->Finish();
}

absl::Status WriteNamedTensors(const std::string& path, const NamedTensors& tensors,
                               std::optional<DType> float_dtype,
                               const std::map<std::string, std::string>& metadata) {
  std::vector<DType> dtypes;
  for (const auto& [name, tensor] : tensors) {
    TANDEM_ASSIGN_OR_RETURN(dtypes.emplace_back(), FromScalarType(tensor.scalar_type()));
    if (float_dtype.has_value() && tensor.is_floating_point()) dtypes.back() = *float_dtype;
  }
  std::vector<WeightSpec> specs;
  NamedTensors ordered;
  for (const size_t i : InFileOrder(dtypes)) {
    const auto& [name, tensor] = tensors[i];
    specs.push_back({.name = name, .dtype = dtypes[i], .shape = tensor.sizes().vec()});
    ordered.emplace_back(name, tensor);
  }
  return WriteTensors(path, specs, SourceOf(ordered), metadata);
}

}  // namespace tandem
