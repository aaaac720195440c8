// A whole safetensors file in one call.
#ifndef TANDEM_COMMON_TENSOR_TESTING_WRITE_SAFETENSORS_H_
#define TANDEM_COMMON_TENSOR_TESTING_WRITE_SAFETENSORS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/safetensors/safetensors_writer.h"

namespace tandem {

// Writes `tensors`, in their order, into the file `path`.
inline absl::Status WriteSafetensors(const std::string& path, absl::Span<const TensorView> tensors,
                                     const std::map<std::string, std::string>& metadata) {
  std::vector<WeightSpec> specs;
  for (const TensorView& tensor : tensors) {
    specs.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  TANDEM_ASSIGN_OR_RETURN(const auto writer, SafetensorsWriter::Create(path, specs, metadata));
  for (const TensorView& tensor : tensors) TANDEM_RETURN_IF_ERROR(writer->Write(tensor));
  return writer->Finish();
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_TESTING_WRITE_SAFETENSORS_H_
