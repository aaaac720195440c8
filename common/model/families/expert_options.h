// The experts of a family's layers, by the keys of config.json. No torch.
#ifndef TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_
#define TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/model/config_fields.h"
#include "common/model/model_config.h"

namespace tandem {

// Keys and defaults are those of `transformers`, but for the number of experts, which must be there
// as `num_experts` or `num_local_experts`. INVALID_ARGUMENT with the field's path for a key that is
// wrong, UNIMPLEMENTED for noise on the router's input (`router_jitter_noise`).

// The key of DeepSeek-V3 that counts shared experts, each as wide as the others.
inline constexpr char kNumSharedExperts[] = "n_shared_experts";

// Returns the key that has the number of experts: the family's own `name`, or `num_local_experts`,
// which `transformers` writes for some families.
std::string NumExpertsKey(const ConfigFields& fields, const std::string& name = "num_experts");

absl::StatusOr<ExpertOptions> MixtralExperts(const ConfigFields& fields);
// The layers are those that `mlp_only_layers` and `decoder_sparse_step` leave to experts.
absl::StatusOr<ExpertOptions> Qwen2MoeExperts(const ConfigFields& fields);
absl::StatusOr<ExpertOptions> Qwen3MoeExperts(const ConfigFields& fields);
// DeepSeek-V3 calls the number of experts `n_routed_experts`. UNIMPLEMENTED for other rules of
// choice than its own (`scoring_func`, `topk_method`, `moe_layer_freq`).
absl::StatusOr<ExpertOptions> DeepseekV3Experts(const ConfigFields& fields);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_FAMILIES_EXPERT_OPTIONS_H_
