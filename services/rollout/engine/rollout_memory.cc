#include "services/rollout/engine/rollout_memory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/base/status_macros.h"
#include "common/model/family.h"
#include "common/model/layer_cache.h"
#include "common/model/parameter_spec.h"
#include "common/model/shard_numel.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kFloatBytes = 4;

// A model that the first `ranks` ranks of the server hold.
struct Lane {
  std::string name;
  const ModelConfig& config;
  int64_t ranks = 1;
};

// The memory of a pass beside the weights and the cache. Lanes run one after the other.
struct PassBytes {
  int64_t activations = 0;
  int64_t logits = 0;
};

absl::StatusOr<std::vector<ParameterSpec>> Parameters(const ModelConfig& config) {
  return ModelParameters(config, {.tied = config.tie_word_embeddings});
}

absl::Status AddLane(const Lane& lane, int64_t tokens, const RolloutMemoryOptions& options,
                     MemoryPlan& plan, PassBytes& pass) {
  if (options.rank >= lane.ranks) return absl::OkStatus();
  const ModelConfig& config = lane.config;
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(config));
  const auto item = static_cast<int64_t>(ItemSizeBytes(options.dtype));
  int64_t weights = 0, cached_per_token = 0;
  for (const ParameterSpec& spec : specs) weights += ShardNumel(spec, options.rank, lane.ranks);
  for (const LayerCache& layer : family->CacheLayout(config, lane.ranks)) {
    cached_per_token += 2 * layer.heads * layer.head_dim;  // keys and values
  }
  plan.items.push_back({lane.name + "_weights", weights * item, options.on_host});
  const int64_t blocks =
      PlanCacheBlocks(options.max_num_seqs, tokens, options.max_batched_tokens).total();
  plan.items.push_back({lane.name + "_kv_cache", blocks * kKvBlockTokens * cached_per_token * item,
                        options.on_host});
  const int64_t activations =
      options.max_batched_tokens * family->InferenceActivations(config, lane.ranks) * item;
  pass.activations = std::max(pass.activations, activations);
  // The columns that all ranks bring are gathered and then put side by side.
  const int64_t copies = lane.ranks > 1 ? 2 : 1;
  const int64_t logits = copies * std::max(kLogitsBytes, config.vocab_size * kFloatBytes);
  pass.logits = std::max(pass.logits, logits);
  return absl::OkStatus();
}

}  // namespace

CacheBlocks PlanCacheBlocks(int64_t max_num_seqs, int64_t max_model_len,
                            int64_t max_batched_tokens) {
  return {.generator = max_num_seqs * KvBlocks(max_model_len),
          .scorer = KvBlocks(std::max(max_model_len, max_batched_tokens))};
}

absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options) {
  MemoryPlan plan;
  int64_t tokens = senior.LongestSequence(options.max_model_len);
  if (junior != nullptr) tokens = junior->LongestSequence(tokens);
  PassBytes pass;
  const int64_t senior_ranks = options.layout.tensor_parallel_size;
  TANDEM_RETURN_IF_ERROR(AddLane({"senior", senior, senior_ranks}, tokens, options, plan, pass));
  if (junior != nullptr) {
    const Lane lane = {"junior", *junior, options.layout.junior_tensor_parallel_size};
    TANDEM_RETURN_IF_ERROR(AddLane(lane, tokens, options, plan, pass));
  }
  if (options.rank < senior_ranks) {
    TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(senior));
    int64_t all = 0, largest = 0;
    for (const ParameterSpec& spec : specs) {
      all += spec.numel();
      largest = std::max(largest, spec.numel());
    }
    // Rank 0 receives all tensors, and sends the other ranks one after the other.
    plan.items.push_back(
        {"staged_weight_update", (options.rank == 0 ? all : largest) * kFloatBytes});
  }
  plan.items.push_back({"activations", pass.activations, options.on_host});
  plan.items.push_back({"logits", pass.logits, options.on_host});
  return plan;
}

}  // namespace tandem::rollout
