// How a server computes: the section `compute` of its configuration. Plain data, no torch.
#ifndef TANDEM_COMMON_MODEL_COMPUTE_OPTIONS_H_
#define TANDEM_COMMON_MODEL_COMPUTE_OPTIONS_H_

#include <string>

namespace tandem {

// The texts are those that common/config accepts.
struct ComputeOptions {
  std::string device = "cpu";     // or "cuda"
  std::string dtype = "float32";  // or "bfloat16"
  std::string kernels = "auto";   // or "aten"
  int num_threads = 0;            // 0: this process's share of the physical cores
  // This process among those of the server on the machine: which device, and whose share.
  int local_rank = 0;
  int local_world_size = 1;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_COMPUTE_OPTIONS_H_
