// Quantisation of a model's linear maps when it is loaded. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_
#define TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_

namespace tandem {

// The values of tandem.types.v1.Quantization.
enum class Quantization {
  kNone,
  kInt8,
  kInt4,
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_QUANTIZATION_H_
