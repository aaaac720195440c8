// Between ATen tensors and plain bytes: files, the wire, digests.
#ifndef TANDEM_COMMON_TENSOR_ATEN_BYTES_H_
#define TANDEM_COMMON_TENSOR_ATEN_BYTES_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/tensor/dtype.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/safetensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

at::ScalarType ToScalarType(DType dtype);
// UNIMPLEMENTED for a type that has no place in a checkpoint (complex, quantised).
absl::StatusOr<DType> FromScalarType(at::ScalarType type);

// A copy in memory of its own, in the view's type.
at::Tensor ToAten(const TensorView& view);

// The view's bytes as a tensor, to be read only and as long as they are there. Bytes that are not
// aligned to the type, which vectorised code may not read, are copied.
at::Tensor AliasAsAten(const TensorView& view);

// A view of a contiguous CPU tensor's bytes, valid while `tensor` lives and keeps its storage.
// INVALID_ARGUMENT when it is not contiguous or not on the CPU.
absl::StatusOr<TensorView> AsView(const std::string& name, const at::Tensor& tensor);

// Writes what `source` gives as one safetensors file of `tensors`, one tensor at a time: that one
// is all that is held of them. Values are converted to the types of `tensors`. Errors as
// SafetensorsWriter, or of the source.
absl::Status WriteTensors(const std::string& path, absl::Span<const WeightSpec> tensors,
                          TensorSource source,
                          const std::map<std::string, std::string>& metadata = {});

// Writes tensors as one safetensors file; floating ones are stored as `float_dtype` if given.
absl::Status WriteNamedTensors(const std::string& path, const NamedTensors& tensors,
                               std::optional<DType> float_dtype = std::nullopt,
                               const std::map<std::string, std::string>& metadata = {});

// Reads every tensor of one safetensors file, in file order, in its own type.
absl::StatusOr<NamedTensors> ReadNamedTensors(const std::string& path);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_BYTES_H_
