// The name, type and shape of a tensor.
#ifndef TANDEM_COMMON_TENSOR_WEIGHT_SPEC_H_
#define TANDEM_COMMON_TENSOR_WEIGHT_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/tensor/dtype.h"

namespace tandem {

struct WeightSpec {
  std::string name;  // Hugging Face parameter name
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  bool operator==(const WeightSpec&) const = default;

  // Returns the bytes of its values.
  int64_t bytes() const {
    auto bytes = static_cast<int64_t>(ItemSizeBytes(dtype));
    for (const int64_t size : shape) bytes *= size;
    return bytes;
  }
};

inline bool IsFloat32(const WeightSpec& tensor) { return tensor.dtype == DType::kFloat32; }

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_WEIGHT_SPEC_H_
