// All tensors of a safetensors file in one call.
#ifndef TANDEM_COMMON_TENSOR_TESTING_READ_NAMED_TENSORS_H_
#define TANDEM_COMMON_TENSOR_TESTING_READ_NAMED_TENSORS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/aten_bytes.h"

namespace tandem {

// Reads every tensor of one safetensors file, in file order, in its own type.
inline absl::StatusOr<NamedTensors> ReadNamedTensors(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(path));
  NamedTensors tensors;
  for (const TensorView& view : file->tensors()) tensors.emplace_back(view.name, ToAten(view));
  return tensors;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_TESTING_READ_NAMED_TENSORS_H_
