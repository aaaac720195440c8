#include "common/model/families/expert_options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

// Reads the number of experts, and how many of them a token takes.
absl::Status ReadCounts(const ConfigFields& fields, const std::string& key, RoutingRule& routing) {
  TANDEM_ASSIGN_OR_RETURN(routing.num_experts, fields.Size(key));
  TANDEM_ASSIGN_OR_RETURN(routing.num_experts_per_tok, fields.Size("num_experts_per_tok"));
  if (routing.num_experts_per_tok > routing.num_experts) {
    return InvalidField(fields.Path("num_experts_per_tok"),
                        absl::StrCat("is ", routing.num_experts_per_tok, ", more than ", key, ", ",
                                     routing.num_experts));
  }
  return absl::OkStatus();
}

// Reads the keys that Qwen2-MoE and Qwen3-MoE share.
absl::StatusOr<ExpertOptions> QwenExperts(const ConfigFields& fields) {
  ExpertOptions experts;
  TANDEM_RETURN_IF_ERROR(ReadCounts(fields, NumExpertsKey(fields, "num_experts"), experts.routing));
  TANDEM_ASSIGN_OR_RETURN(experts.routing.norm_topk_prob, fields.Bool("norm_topk_prob"));
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size, fields.Size("moe_intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(experts.step, fields.Size("decoder_sparse_step"));
  TANDEM_ASSIGN_OR_RETURN(experts.dense_layers, fields.Counts("mlp_only_layers"));
  return experts;
}

}  // namespace

std::string NumExpertsKey(const ConfigFields& fields, const std::string& name,
                          const std::string& other_name) {
  return fields.Find(other_name) != nullptr ? other_name : name;
}

absl::StatusOr<ExpertOptions> MixtralExperts(const ConfigFields& fields) {
  ExpertOptions experts = {.routing = {.norm_topk_prob = true}};
  TANDEM_RETURN_IF_ERROR(ReadCounts(
      fields, NumExpertsKey(fields, "num_local_experts", "num_experts"), experts.routing));
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size, fields.Size("intermediate_size"));
  return experts;
}

absl::StatusOr<ExpertOptions> Qwen2MoeExperts(const ConfigFields& fields) {
  TANDEM_ASSIGN_OR_RETURN(ExpertOptions experts, QwenExperts(fields));
  TANDEM_ASSIGN_OR_RETURN(experts.shared_intermediate_size,
                          fields.Size("shared_expert_intermediate_size"));
  experts.shared_gate = true;
  return experts;
}

absl::StatusOr<ExpertOptions> Qwen3MoeExperts(const ConfigFields& fields) {
  return QwenExperts(fields);
}

absl::StatusOr<ExpertOptions> DeepseekV3Experts(const ConfigFields& fields) {
  ExpertOptions experts = {
      .routing = {.score = RouterScore::kSigmoid, .score_correction_bias = true}};
  RoutingRule& routing = experts.routing;
  TANDEM_RETURN_IF_ERROR(ReadCounts(fields, NumExpertsKey(fields, "n_routed_experts"), routing));
  TANDEM_ASSIGN_OR_RETURN(routing.norm_topk_prob, fields.Truth("norm_topk_prob"));
  TANDEM_ASSIGN_OR_RETURN(routing.routed_scaling_factor, fields.Positive("routed_scaling_factor"));
  TANDEM_ASSIGN_OR_RETURN(routing.n_group, fields.Size("n_group"));
  TANDEM_ASSIGN_OR_RETURN(routing.topk_group, fields.Size("topk_group"));
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
  TANDEM_ASSIGN_OR_RETURN(experts.intermediate_size, fields.Size("moe_intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(const int64_t shared, fields.Count(kNumSharedExperts));
  experts.shared_intermediate_size = shared * experts.intermediate_size;
  TANDEM_ASSIGN_OR_RETURN(experts.first_layer, fields.Count("first_k_dense_replace"));
  return experts;
}

}  // namespace tandem
