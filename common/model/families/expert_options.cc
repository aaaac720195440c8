#include "common/model/families/expert_options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem {
namespace {

// Reads the number of experts, and how many of them a token takes.
absl::Status ReadCounts(const ConfigFields& fields, int64_t default_per_token, RoutingRule& routing,
                        const std::string& name = "num_experts") {
  const std::string key = NumExpertsKey(fields, name);
  TANDEM_ASSIGN_OR_RETURN(routing.num_experts, fields.Size(key));
  TANDEM_ASSIGN_OR_RETURN(routing.num_experts_per_tok,
                          fields.Size("num_experts_per_tok", default_per_token));
  if (routing.num_experts_per_tok > routing.num_experts) {
    return InvalidField(fields.Path("num_experts_per_tok"),
                        absl::StrCat("is ", routing.num_experts_per_tok, ", more than ", key, ", ",
                                     routing.num_experts));
  }
  return absl::OkStatus();
}

// Reads the keys that Qwen2-MoE and Qwen3-MoE share.
absl::StatusOr<ExpertOptions> QwenExperts(const ConfigFields& fields, int64_t default_per_token,
                                          int64_t default_size) {
  ExpertOptions experts;
  TANDEM_RETURN_IF_ERROR(ReadCounts(fields, default_per_token, experts.routing));
  TANDEM_ASSIGN_OR_RETURN(experts.routing.norm_topk_prob, fields.Bool("norm_topk_prob", false));
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size,
                          fields.Size("moe_intermediate_size", default_size));
  TANDEM_ASSIGN_OR_RETURN(experts.step, fields.Size("decoder_sparse_step", 1));
  TANDEM_ASSIGN_OR_RETURN(experts.dense_layers, fields.Counts("mlp_only_layers"));
  return experts;
}

}  // namespace

std::string NumExpertsKey(const ConfigFields& fields, const std::string& name) {
  return fields.Find(name) != nullptr ? name : "num_local_experts";
}

absl::StatusOr<ExpertOptions> MixtralExperts(const ConfigFields& fields) {
  ExpertOptions experts = {.routing = {.norm_topk_prob = true}};
  TANDEM_RETURN_IF_ERROR(ReadCounts(fields, /*default_per_token=*/2, experts.routing));
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size, fields.Size("intermediate_size"));
  const auto* const noise = fields.Find("router_jitter_noise");
  if (noise != nullptr && *noise != 0) {
    return fields.NotSupported("router_jitter_noise", "noise on the input of the router");
  }
  return experts;
}

absl::StatusOr<ExpertOptions> Qwen2MoeExperts(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(ExpertOptions experts, QwenExperts(fields, /*default_per_token=*/4,
                                                             /*default_size=*/1408));
  TANDEM_ASSIGN_OR_RETURN(experts.shared_intermediate_size,
                          fields.Size("shared_expert_intermediate_size", 5632));
  experts.shared_gate = true;
  return experts;
}

absl::StatusOr<ExpertOptions> Qwen3MoeExperts(const ConfigFields& fields) {
  return QwenExperts(fields, /*default_per_token=*/8, /*default_size=*/768);
}

absl::StatusOr<ExpertOptions> DeepseekV3Experts(const ConfigFields& fields) {
  ExpertOptions experts = {
      .routing = {.score = RouterScore::kSigmoid, .score_correction_bias = true}};
  RoutingRule& routing = experts.routing;
  TANDEM_RETURN_IF_ERROR(ReadCounts(fields, /*default_per_token=*/8, routing, "n_routed_experts"));
  TANDEM_ASSIGN_OR_RETURN(routing.norm_topk_prob, fields.Bool("norm_topk_prob", true));
  TANDEM_ASSIGN_OR_RETURN(routing.routed_scaling_factor,
                          fields.Positive("routed_scaling_factor", 2.5));
  TANDEM_ASSIGN_OR_RETURN(routing.n_group, fields.Size("n_group", 8));
  TANDEM_ASSIGN_OR_RETURN(routing.topk_group, fields.Size("topk_group", 4));
  // A group is judged by its two best experts.
  if (routing.num_experts % routing.n_group != 0 || routing.num_experts < 2 * routing.n_group) {
    return InvalidField(fields.Path("n_group"),
                        absl::StrCat("must divide n_routed_experts (", routing.num_experts,
                                     ") into groups of at least 2"));
  }
  const int64_t group_size = routing.num_experts / routing.n_group;
  if (routing.topk_group > routing.n_group ||
      routing.topk_group * group_size < routing.num_experts_per_tok) {
    return InvalidField(fields.Path("topk_group"),
                        absl::StrCat("must be at most n_group (", routing.n_group,
                                     ") groups, with num_experts_per_tok experts in all"));
  }
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size, fields.Size("moe_intermediate_size", 2048));
  TANDEM_ASSIGN_OR_RETURN(const int64_t shared, fields.Count(kNumSharedExperts, 1));
  experts.shared_intermediate_size = shared * experts.intermediate_size;
  TANDEM_ASSIGN_OR_RETURN(experts.first_layer, fields.Count("first_k_dense_replace", 3));
  TANDEM_ASSIGN_OR_RETURN(const std::string score, fields.String("scoring_func", "sigmoid"));
  if (score != "sigmoid") return fields.NotSupported("scoring_func", absl::StrCat("'", score, "'"));
  TANDEM_ASSIGN_OR_RETURN(const std::string method, fields.String("topk_method", "noaux_tc"));
  if (method != "noaux_tc") {
    return fields.NotSupported("topk_method", absl::StrCat("'", method, "'"));
  }
  TANDEM_ASSIGN_OR_RETURN(const int64_t frequency, fields.Size("moe_layer_freq", 1));
  if (frequency != 1) return fields.NotSupported("moe_layer_freq", "another value than 1");
  return experts;
}

}  // namespace tandem
