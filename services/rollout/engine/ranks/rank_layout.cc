#include "services/rollout/engine/ranks/rank_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/family.h"

namespace tandem::rollout {
namespace {

constexpr char kSize[] = "senior.tensor_parallel_size";
constexpr char kJuniorSize[] = "junior.tensor_parallel_size";
constexpr char kExperts[] = "senior.enable_expert_parallel";
constexpr char kJuniorExperts[] = "junior.enable_expert_parallel";

absl::Status CheckShards(const ModelConfig& model, int64_t ranks, absl::string_view field,
                         bool whole_experts, absl::string_view experts_field) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(model.model_type));
  TANDEM_RETURN_IF_ERROR(family->CheckShards(model, ranks, whole_experts, field));
  if (!whole_experts) return absl::OkStatus();
  if (ranks == 1) {
    return InvalidField(experts_field, absl::StrCat("needs ", field, " above 1"));
  }
  return family->CheckExpertShards(model, ranks, experts_field);
}

}  // namespace

absl::Status CheckRankLayout(const RankLayout& layout, const ModelConfig& senior,
                             const ModelConfig* junior, int64_t world_size) {
  const int64_t senior_ranks = layout.tensor_parallel_size;
  const int64_t junior_ranks = junior == nullptr ? 1 : layout.junior_tensor_parallel_size;
  for (const auto& [field, ranks] : {std::pair{kSize, senior_ranks}, {kJuniorSize, junior_ranks}}) {
    if (ranks < 1) return InvalidField(field, absl::StrCat("must be at least 1, got ", ranks));
  }
  if (std::max(senior_ranks, junior_ranks) != world_size) {
    return InvalidField(
        junior_ranks > senior_ranks ? kJuniorSize : kSize,
        absl::StrCat("the senior is on the first ", senior_ranks,
                     " ranks and the junior on the first ", junior_ranks, ", so the server needs ",
                     std::max(senior_ranks, junior_ranks), " ranks, but it has ", world_size));
  }
  TANDEM_RETURN_IF_ERROR(
      CheckShards(senior, senior_ranks, kSize, layout.enable_expert_parallel, kExperts));
  if (junior == nullptr) return absl::OkStatus();
  const auto devices = static_cast<int64_t>(layout.junior_gpu_devices.size());
  if (devices != 0 && devices != junior_ranks) {
    return InvalidField(
        "junior.gpu_devices",
        absl::StrCat("names ", devices, " devices, but the junior has ", junior_ranks, " ranks"));
  }
  return CheckShards(*junior, junior_ranks, kJuniorSize, layout.junior_enable_expert_parallel,
                     kJuniorExperts);
}

}  // namespace tandem::rollout
