#include "services/rollout/engine/rollout_memory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/family.h"
#include "common/model/layer_cache.h"
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
  LaneBlocks blocks = {};
  int64_t block_bytes = 0;  // of a whole block, on all ranks
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

// Returns the bytes of the weights that rank `rank` holds of a lane.
int64_t WeightsOf(const Lane& lane, const std::vector<ParameterSpec>& specs, int64_t rank) {
  int64_t bytes = 0;
  for (const ParameterSpec& spec : specs) {
    bytes += WeightBytes(spec, rank, lane.ranks, lane.options.storage);
  }
  return bytes;
}

// Adds the memory that an update of the senior's weights takes while it goes on.
absl::Status AddUpdate(const Lane& senior, const RolloutMemoryOptions& options, MemoryPlan& plan) {
  if (options.rank >= senior.ranks) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(senior.config));
  int64_t all = 0, largest = 0;
  for (const ParameterSpec& spec : specs) {
    all += spec.numel() * kFloatBytes;
    largest = std::max(largest, spec.numel() * kFloatBytes);
  }
  // Other ranks get one tensor after the other, and change their shards in place.
  int64_t staged = largest;
  if (options.rank == 0) {
    // The tensor that comes and the one that is packed (common/weights/tensor_stager.h); rank 0 of
    // a sharded senior keeps all of them for the others.
    staged = senior.ranks > 1 ? all : 2 * largest;
    plan.items.push_back(
        {"weight_update_copy", WeightsOf(senior, specs, options.rank), options.on_host});
  }
  plan.items.push_back({"staged_weight_update", staged});
  return absl::OkStatus();
}

// Returns the bytes of a block of the lane's cache, in one of `ranks` shards.
int64_t BlockBytes(const Family& family, const Lane& lane, int64_t ranks) {
  int64_t per_token = 0;
  for (const LayerCache& layer : family.CacheLayout(lane.config, ranks)) {
    per_token += 2 * layer.heads * layer.head_dim;  // keys and values
  }
  return kKvBlockTokens * per_token *
         static_cast<int64_t>(ItemSizeBytes(lane.options.storage.dtype));
}

// Returns the blocks of a lane without a limit of bytes.
LaneBlocks WantedBlocks(const Lane& lane, const RolloutMemoryOptions& options) {
  const int64_t tokens = lane.config.LongestSequence(lane.options.max_model_len);
  return {.generator = options.max_num_seqs * KvBlocks(tokens),
          .scorer = KvBlocks(std::max(tokens, options.max_batched_tokens))};
}

// Cuts the blocks of a lane to `most` in all.
absl::Status LimitBlocks(const Lane& lane, int64_t most, LaneBlocks& blocks) {
  const int64_t tokens = lane.config.LongestSequence(lane.options.max_model_len);
  blocks.generator = std::min(blocks.generator, most - blocks.scorer);
  if (blocks.generator >= KvBlocks(tokens)) return absl::OkStatus();
  return InvalidField(
      "kv_cache_bytes",
      absl::StrCat("holds ", most, " blocks of ", kKvBlockTokens,
                   " tokens for each model; scoring (", blocks.scorer, ") and one sequence of ",
                   tokens, " tokens of the ", lane.name, " (", KvBlocks(tokens), ") need ",
                   blocks.scorer + KvBlocks(tokens)));
}

absl::Status AddLane(const Lane& lane, const RolloutMemoryOptions& options, MemoryPlan& plan,
                     PassBytes& pass) {
  if (options.rank >= lane.ranks) return absl::OkStatus();
  const ModelConfig& config = lane.config;
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs, Parameters(config));
  const auto item = static_cast<int64_t>(ItemSizeBytes(lane.options.storage.dtype));
  plan.items.push_back(
      {lane.name + "_weights", WeightsOf(lane, specs, options.rank), options.on_host});
  plan.items.push_back({lane.name + "_kv_cache",
                        lane.blocks.total() * BlockBytes(*family, lane, lane.ranks),
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

RolloutMemoryOptions ToMemoryOptions(const EngineOptions& options, int64_t rank) {
  const auto lane = [&](const LaneOptions& one) {
    return LaneMemoryOptions{.max_model_len = one.max_model_len,
                             .storage = StorageOf(one, options.compute)};
  };
  return {.senior = lane(options.senior),
          .junior = lane(options.junior),
          .max_num_seqs = options.max_num_seqs,
          .max_batched_tokens = options.max_batched_tokens,
          .kv_cache_bytes = options.kv_cache_bytes,
          .on_host = options.compute.device == "cpu",
          .layout = options.layout,
          .rank = rank};
}

absl::StatusOr<CacheBlocks> PlanCacheBlocks(const ModelConfig& senior, const ModelConfig* junior,
                                            const RolloutMemoryOptions& options) {
  std::vector<Lane> lanes = {{.name = "senior", .config = senior, .options = options.senior}};
  if (junior != nullptr) {
    lanes.push_back({.name = "junior", .config = *junior, .options = options.junior});
  }
  CacheBlocks result;
  for (Lane& lane : lanes) {
    TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(lane.config.model_type));
    lane.block_bytes = BlockBytes(*family, lane, /*ranks=*/1);
    lane.blocks = WantedBlocks(lane, options);
  }
  if (options.kv_cache_bytes > 0) {
    // The lane that wants fewer blocks comes first, so that the other gets what it leaves.
    std::vector<Lane*> order;
    int64_t bytes = options.kv_cache_bytes, bytes_of_each = 0;
    for (Lane& lane : lanes) {
      order.push_back(&lane);
      bytes_of_each += lane.block_bytes;
    }
    std::ranges::stable_sort(order, {}, [](const Lane* lane) { return lane->blocks.total(); });
    for (Lane* lane : order) {
      TANDEM_RETURN_IF_ERROR(LimitBlocks(*lane, bytes / bytes_of_each, lane->blocks));
      bytes -= lane->blocks.total() * lane->block_bytes;
      bytes_of_each -= lane->block_bytes;
    }
  }
  result.senior = lanes[0].blocks;
  if (junior != nullptr) result.junior = lanes[1].blocks;
  return result;
}

absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options) {
  MemoryPlan plan;
  PassBytes pass;
  TANDEM_ASSIGN_OR_RETURN(const CacheBlocks blocks, PlanCacheBlocks(senior, junior, options));
  const Lane senior_lane = {"senior", senior, options.layout.tensor_parallel_size, options.senior,
                            blocks.senior};
  TANDEM_RETURN_IF_ERROR(AddLane(senior_lane, options, plan, pass));
  if (junior != nullptr) {
    const int64_t ranks = options.layout.junior_tensor_parallel_size;
    TANDEM_RETURN_IF_ERROR(
        AddLane({"junior", *junior, ranks, options.junior, blocks.junior}, options, plan, pass));
  }
  TANDEM_RETURN_IF_ERROR(AddUpdate(senior_lane, options, plan));
  plan.items.push_back({"activations", pass.activations, options.on_host});
  plan.items.push_back({"logits", pass.logits, options.on_host});
  return plan;
}

}  // namespace tandem::rollout
