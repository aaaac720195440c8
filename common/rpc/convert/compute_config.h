// Converts sections of a resolved configuration into the plain values that engines and plans take.
#ifndef TANDEM_COMMON_RPC_CONVERT_COMPUTE_CONFIG_H_
#define TANDEM_COMMON_RPC_CONVERT_COMPUTE_CONFIG_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/kernels/weight_format.h"
#include "common/model/config/compute_options.h"
#include "common/model/config/lora.h"
#include "common/model/config/model_config.h"
#include "common/model/loading/weight_files_check.h"
#include "common/tensor/dtype.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

inline ComputeOptions ToComputeOptions(const config::v1::ComputeOptions& config) {
  return {.device = config.device(),
          .dtype = config.dtype(),
          .kernels = config.kernels(),
          .weight_dtype = config.weight_dtype(),
          .activation_dtype = config.activation_dtype(),
          .product_rows = config.product_rows(),
          .num_threads = config.num_threads(),
          .ranks_per_gpu = config.ranks_per_gpu()};
}

inline LoraOptions ToLoraOptions(const config::v1::LoraOptions& config) {
  return {.rank = config.rank(),
          .alpha = config.alpha(),
          .target_modules = {config.target_modules().begin(), config.target_modules().end()},
          .seed = config.seed(),
          .path = config.path()};
}

inline DType ComputeType(const config::v1::ComputeOptions& config) {
  return config.dtype() == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

inline DType WeightType(const config::v1::ComputeOptions& config) {
  return config.weight_dtype() == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

inline DType ActivationType(const config::v1::ComputeOptions& config) {
  return config.activation_dtype() == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

// Returns the format of the matrices that a trainer or critic does not train.
template <typename Config>
kernels::WeightFormat FrozenFormat(const Config& config) {
  switch (config.quantization()) {
    case types::v1::QUANTIZATION_INT8:
      return kernels::WeightFormat::kInt8;
    case types::v1::QUANTIZATION_INT4:
      return kernels::WeightFormat::kInt4;
    default:
      return config.dtype() == "bfloat16" ? kernels::WeightFormat::kBfloat16
                                          : kernels::WeightFormat::kDense;
  }
}

// Returns the model config of the directory in the configuration's `field`, checked against its
// weight files. Errors name the field.
inline absl::StatusOr<ModelConfig> ConfiguredModel(absl::string_view field,
                                                   const std::string& directory) {
  absl::StatusOr<ModelConfig> model = LoadModelConfig(directory);
  if (!model.ok()) return PrependFieldPath(field, model.status());
  TANDEM_RETURN_IF_ERROR(PrependFieldPath(field, CheckSizes(*model, directory)));
  return model;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CONVERT_COMPUTE_CONFIG_H_
