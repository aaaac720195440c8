// The experts of a family's layers, by the keys of config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/model/config/config_fields.h"
#include "common/model/config/model_config.h"

namespace tandem {

// These read fields that ObeyedKeys returned. INVALID_ARGUMENT with the field's path for a key that
// is wrong.

// The key of DeepSeek-V3 that counts shared experts, each as wide as the others.
inline constexpr char kNumSharedExperts[] = "n_shared_experts";

// Returns the key that has the number of experts: the class's own `name`, or the other one where
// config.json has it.
std::string NumExpertsKey(const ConfigFields& fields, const std::string& name,
                          const std::string& other_name = "num_local_experts");

absl::StatusOr<ExpertOptions> MixtralExperts(const ConfigFields& fields);
// The layers are those that `mlp_only_layers` and `decoder_sparse_step` leave to experts.
absl::StatusOr<ExpertOptions> Qwen2MoeExperts(const ConfigFields& fields);
absl::StatusOr<ExpertOptions> Qwen3MoeExperts(const ConfigFields& fields);
// DeepSeek-V3 calls the number of experts `n_routed_experts`.
absl::StatusOr<ExpertOptions> DeepseekV3Experts(const ConfigFields& fields);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_
