// Flat names of the settings of a rollout server's lanes: those of the paper's code. A source of a
// configuration may use either name of a setting, and its errors repeat the name that it uses.
// docs/reference/configuration.md has this table.
#ifndef TANDEM_COMMON_CONFIG_FLAT_NAMES_H_
#define TANDEM_COMMON_CONFIG_FLAT_NAMES_H_

#include "absl/strings/string_view.h"

namespace tandem::config {

struct FlatName {
  absl::string_view flat;
  absl::string_view section;  // the field that holds the message, "senior"
  absl::string_view field;    // in that message, "dtype"
};

inline constexpr FlatName kFlatNames[] = {
    {"senior_model", "senior", "model"},
    {"senior_model_revision", "senior", "model_revision"},
    {"senior_dtype", "senior", "dtype"},
    {"senior_activation_dtype", "senior", "activation_dtype"},
    {"senior_quantization", "senior", "quantization"},
    {"max_model_len", "senior", "max_model_len"},
    {"tensor_parallel_size", "senior", "tensor_parallel_size"},
    {"enable_expert_parallel", "senior", "enable_expert_parallel"},
    {"senior_gpu_memory_utilization", "senior", "gpu_memory_utilization"},
    {"senior_enforce_eager", "senior", "enforce_eager"},
    {"senior_speculator", "senior", "speculator"},
    {"junior_model", "junior", "model"},
    {"junior_model_revision", "junior", "model_revision"},
    {"junior_dtype", "junior", "dtype"},
    {"junior_activation_dtype", "junior", "activation_dtype"},
    {"junior_quantization", "junior", "quantization"},
    {"junior_max_model_len", "junior", "max_model_len"},
    {"junior_tensor_parallel_size", "junior", "tensor_parallel_size"},
    {"junior_enable_expert_parallel", "junior", "enable_expert_parallel"},
    {"junior_gpu_devices", "junior", "gpu_devices"},
    {"junior_gpu_memory_utilization", "junior", "gpu_memory_utilization"},
    {"junior_enforce_eager", "junior", "enforce_eager"},
};

}  // namespace tandem::config

#endif  // TANDEM_COMMON_CONFIG_FLAT_NAMES_H_
