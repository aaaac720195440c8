// The section `compute` of a configuration. Plain data, no torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_COMPUTE_OPTIONS_H_
#define TANDEM_COMMON_MODEL_CONFIG_COMPUTE_OPTIONS_H_

#include <cstdint>
#include <string>

namespace tandem {

// Values are the texts that the configuration accepts.
struct ComputeOptions {
  std::string device;   // "cpu" or "cuda"
  std::string dtype;    // "float32" or "bfloat16"
  std::string kernels;  // "auto" or "aten"
  // "float32" or "bfloat16" for trainer and critic (Placement::weight_dtype); empty: float32.
  std::string weight_dtype;
  // "float32" or "bfloat16" for trainer and critic (Placement::activation_dtype); empty: float32.
  std::string activation_dtype;
  int64_t product_rows = 0;  // of ops::SetProductRows
  int num_threads;           // 0: the physical cores, divided by local_world_size
  // The rank of this process on its machine, the number of ranks there, and of those that share a
  // GPU.
  int local_rank = 0;
  int local_world_size = 1;
  int ranks_per_gpu = 1;

  // The index of this process's GPU, where `device` is "cuda".
  int gpu() const { return local_rank / ranks_per_gpu; }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_COMPUTE_OPTIONS_H_
