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
  int num_threads = 0;            // 0: physical cores
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_COMPUTE_OPTIONS_H_
