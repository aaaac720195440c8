// Names of the code from before the paper's terms, and the names that replaced them. Whoever still
// writes an old name gets an error with the new one. clients/python/tandem/rpc/renamed_names.json
// is generated from this file.
#ifndef TANDEM_COMMON_CONFIG_RENAMED_NAMES_H_
#define TANDEM_COMMON_CONFIG_RENAMED_NAMES_H_

#include <optional>

#include "absl/strings/string_view.h"

namespace tandem::config {

struct RenamedName {
  absl::string_view old_name;
  absl::string_view new_name;
};

inline constexpr RenamedName kRenamedNames[] = {
    // Settings of the rollout server.
    {"frozen_model", "junior_model"},
    {"frozen_model_revision", "junior_model_revision"},
    {"frozen_tensor_parallel_size", "junior_tensor_parallel_size"},
    {"frozen_gpu_devices", "junior_gpu_devices"},
    {"frozen_gpu_memory_utilization", "junior_gpu_memory_utilization"},
    {"frozen_dtype", "junior_dtype"},
    {"frozen_quantization", "junior_quantization"},
    {"frozen_enforce_eager", "junior_enforce_eager"},
    {"frozen_max_model_len", "junior_max_model_len"},
    // A message with the model's configuration each; here the senior's settings stand in the
    // server's own.
    {"target_model_config", "senior_model"},
    {"target_parallel_config", "tensor_parallel_size"},
    // Fields of TandemConfig.
    {"prob_primary", "prob_senior"},
    // Fields of PolicyObjective.
    {"tandem_jr_tkn_weight", "junior_token_loss_weight"},
    // Fields of trajectories and of streamed tokens.
    {"tandem_model_mask", "authorship_mask"},
    {"new_tandem_model_mask", "authorship_mask"},
    {"tandem_mask", "authorship_mask"},
    {"model_mask", "authorship_mask"},
    {"model_a_mask", "authorship_mask"},
    // Metrics.
    {"tandem/primary_token_fraction", "tandem/senior_token_fraction"},
    {"tandem/frozen_token_fraction", "tandem/junior_token_fraction"},
};

// Returns the name that replaced `name`; nullopt for a name that was never replaced.
inline std::optional<absl::string_view> NewName(absl::string_view name) {
  for (const RenamedName& renamed : kRenamedNames) {
    if (renamed.old_name == name) return renamed.new_name;
  }
  return std::nullopt;
}

}  // namespace tandem::config

#endif  // TANDEM_COMMON_CONFIG_RENAMED_NAMES_H_
