// Quantisation of a model's linear maps when it is loaded. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_
#define TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_

#include "common/kernels/weight_format.h"
#include "common/tensor/dtype.h"

namespace tandem {

// The values of tandem.types.v1.Quantization.
enum class Quantization {
  kNone,
  kInt8,
  kInt4,
};

// Returns the packed format of matrices that are stored so: quantised ones whatever the `dtype`.
inline kernels::WeightFormat PackedFormat(DType dtype, Quantization quantization) {
  switch (quantization) {
    case Quantization::kInt8:
      return kernels::WeightFormat::kInt8;
    case Quantization::kInt4:
      return kernels::WeightFormat::kInt4;
    case Quantization::kNone:
      break;
  }
  return dtype == DType::kBFloat16 ? kernels::WeightFormat::kBfloat16
                                   : kernels::WeightFormat::kFloat32;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_
