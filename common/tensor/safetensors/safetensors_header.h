// Parses the JSON header of a safetensors file as a stream, so that a hostile header costs no more
// memory than it has bytes.
#ifndef TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_HEADER_H_
#define TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // offsets into the data section
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of `begin`
  std::map<std::string, std::string> metadata;
};

// Checks everything but the file's length: types, shapes, sizes, and that the tensors lie back to
// back from offset 0. Errors read "<path>: tensor '<name>': ...".
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         absl::string_view path);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_HEADER_H_
