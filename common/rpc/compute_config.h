// The section `compute` of a resolved configuration as the plain values that engines and plans
// take.
#ifndef TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_
#define TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_

#include "common/model/compute_options.h"
#include "common/tensor/dtype.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

inline ComputeOptions ToComputeOptions(const config::v1::ComputeOptions& config) {
  return {.device = config.device(),
          .dtype = config.dtype(),
          .kernels = config.kernels(),
          .num_threads = config.num_threads()};
}

inline DType ComputeType(const config::v1::ComputeOptions& config) {
  return config.dtype() == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_
