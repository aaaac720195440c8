#include "services/rollout/engine/rollout_memory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/base/status_macros.h"
#include "common/model/family.h"
#include "common/model/parameter_spec.h"
#include "common/model/shard.h"
#include "common/model/shard_numel.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kFloatBytes = 4;

// A model that the first `ranks` ranks of the server hold.
struct Lane {
  std::string name;
  const ModelConfig& config;
  int64_t ranks = 1;
  const LaneMemoryOptions& options;
};

// The memory of a pass beside the weights and the cache. Lanes run one after the other.
struct PassBytes {
  int64_t activations = 0;
  int64_t logits = 0;
};

absl::StatusOr<std::vector<ParameterSpec>> Parameters(const ModelConfig& config) {
  return ModelParameters(config, {.tied = config.tie_word_embeddings});
}

// Returns the bytes of the shard that rank `rank` holds of a parameter. Matrices are linear maps,
// or the embedding.
int64_t WeightBytes(const ParameterSpec& spec, int64_t rank, int64_t ranks,
                    const LaneStorage& storage) {
  const bool packed = storage.weight_format != kernels::WeightFormat::kDense;
  if (!packed || spec.shape.size() != 2) {
    return ShardNumel(spec, rank, ranks) * static_cast<int64_t>(ItemSizeBytes(storage.dtype));
  }
  std::vector<int64_t> shape = spec.shape;
  if (spec.shard_axis.has_value()) {
    shape = Shard{.axis = *spec.shard_axis, .index = rank, .count = ranks}.ShapeOf(shape);
  }
  return kernels::PackedBytes(storage.weight_format, shape[0], shape[1]);
}

absl::Status AddLane(const Lane& lane, const RolloutMemoryOptions& options, MemoryPlan& plan,
                     PassBytes& pass) {
  if (options.rank >= lane.ranks) return absl::OkStatus();
  const ModelConfig& config = lane.config;
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(config));
  const LaneStorage& storage = lane.options.storage;
  const auto item = static_cast<int64_t>(ItemSizeBytes(storage.dtype));
  const int64_t tokens = config.LongestSequence(lane.options.max_model_len);
  int64_t weights = 0, cached_per_token = 0;
  for (const ParameterSpec& spec : specs) {
    weights += WeightBytes(spec, options.rank, lane.ranks, storage);
  }
  for (const LayerCache& layer : family->CacheLayout(config, lane.ranks)) {
    cached_per_token += 2 * layer.heads * layer.head_dim;  // keys and values
  }
  plan.items.push_back({lane.name + "_weights", weights, options.on_host});
  plan.items.push_back({lane.name + "_kv_cache",
                        options.num_slots * tokens * cached_per_token * item, options.on_host});
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

absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options) {
  MemoryPlan plan;
  PassBytes pass;
  const int64_t senior_ranks = options.layout.tensor_parallel_size;
  TANDEM_RETURN_IF_ERROR(
      AddLane({"senior", senior, senior_ranks, options.senior}, options, plan, pass));
  if (junior != nullptr) {
    const int64_t ranks = options.layout.junior_tensor_parallel_size;
    TANDEM_RETURN_IF_ERROR(
        AddLane({"junior", *junior, ranks, options.junior}, options, plan, pass));
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
