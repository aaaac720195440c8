// The section `compute` of a resolved configuration as the plain struct that engines take.
#ifndef TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_
#define TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_

#include "common/model/compute_options.h"
#include "tandem/config/v1/server_config.pb.h"

namespace tandem::rpc {

inline ComputeOptions ToComputeOptions(const config::v1::ComputeOptions& config) {
  return {.device = config.device(),
          .dtype = config.dtype(),
          .kernels = config.kernels(),
          .num_threads = config.num_threads()};
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_COMPUTE_CONFIG_H_
