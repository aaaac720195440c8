// Conversions between ATen tensors and plain bytes, for files, the wire and digests.
#ifndef TANDEM_COMMON_TENSOR_ATEN_ATEN_BYTES_H_
#define TANDEM_COMMON_TENSOR_ATEN_ATEN_BYTES_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/dtype.h"
#include "common/tensor/safetensors/safetensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

at::ScalarType ToScalarType(DType dtype);
// UNIMPLEMENTED for a type that has no place in a checkpoint (complex, quantised).
absl::StatusOr<DType> FromScalarType(at::ScalarType type);

// Returns a copy of the view, in its type.
at::Tensor ToAten(const TensorView& view);

// Returns a tensor in the view's memory, which must stay alive and must not be written. Copies
// bytes that are not aligned to the type, as vectorised code cannot read them.
at::Tensor AliasAsAten(const TensorView& view);

// Returns a view of a contiguous CPU tensor's bytes, valid while `tensor` lives and keeps its
// storage. INVALID_ARGUMENT if it is not contiguous or not on the CPU.
absl::StatusOr<TensorView> AsView(const std::string& name, const at::Tensor& tensor);

// Writes the tensors that `source` gives as one safetensors file of `tensors`, with the values
// converted to the types of `tensors`. It holds one tensor at a time, of a device two buffers of
// HostCopies. Errors of SafetensorsWriter or `source`.
absl::Status WriteTensors(const std::string& path, absl::Span<const WeightSpec> tensors,
                          TensorSource source,
                          const std::map<std::string, std::string>& metadata = {});

// Writes tensors as one safetensors file; floating ones are stored as `float_dtype` if given.
absl::Status WriteNamedTensors(const std::string& path, const NamedTensors& tensors,
                               std::optional<DType> float_dtype = std::nullopt,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_ATEN_BYTES_H_
