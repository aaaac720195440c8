// The memory that one rank of a rollout server takes, before anything is loaded. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/model/config/model_config.h"
#include "common/speculator/speculator_memory.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/blocks/lane_storage.h"
#include "services/rollout/engine/ranks/rank_layout.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// The settings by which a server takes less memory.
inline constexpr char kMemorySettings[] =
    "a smaller kv_cache_bytes, max_num_seqs, max_model_len or max_batched_tokens, compute.dtype "
    "bfloat16, more ranks (senior.tensor_parallel_size)";

// Bytes of logits that a lane computes at a time, if that is a row or more.
inline constexpr int64_t kLogitsBytes = 64 << 20;

// Returns the rows of `width` logits that a lane computes at a time.
inline int64_t LogitsRows(int64_t width) {
  return std::max<int64_t>(1, kLogitsBytes / (width * static_cast<int64_t>(sizeof(float))));
}

// Bytes of the rows of images that a lane keeps from one pass to the next.
inline constexpr int64_t kImageRowBytes = 64 << 20;

// The blocks of one lane's KV cache: first those of sequences that are being written, then those of
// sequences that are being scored.
struct LaneBlocks {
  int64_t generator = 0;
  int64_t scorer = 0;

  int64_t total() const { return generator + scorer; }
};

struct CacheBlocks {
  LaneBlocks senior, junior;
};

struct LaneMemoryOptions {
  int64_t max_model_len = 0;  // the model's own limit applies, too
  LaneStorage storage = {.dtype = DType::kFloat32,
                         .weight_format = kernels::WeightFormat::kDense,
                         .cache_dtype = DType::kFloat32};
  LoraOptions lora = {};
  // Fraction of the memory of the lane's GPU; see PlanCacheBlocks.
  std::optional<double> gpu_memory_utilization = std::nullopt;
  bool enforce_eager = true;
};

struct RolloutMemoryOptions {
  LaneMemoryOptions senior = {};
  LaneMemoryOptions junior = {};
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;      // in one forward pass
  int64_t kv_cache_bytes = 0;          // of both lanes, on all ranks; 0: see PlanCacheBlocks
  int64_t product_rows = 0;            // to a multiple of which passes are padded; 0: not
  int64_t blob_cache_bytes = 0;        // of a senior that takes images
  FreeMemory free = {};                // for this rank
  bool on_host = true;                 // whether the CPU computes
  bool junior_has_own_device = false;  // a GPU, the second one of this rank
  RankLayout layout = {};
  int64_t rank = 0;                // rank 0 receives new weights, and has the speculator
  bool shares_base_model = false;  // SharesBaseModel
  speculator::SpeculatorSize speculator = {};
};

// Returns the options of the memory on rank `rank`. `speculator` is the server's, whatever the
// rank.
RolloutMemoryOptions ToMemoryOptions(const EngineOptions& options, int64_t rank,
                                     const speculator::SpeculatorSize& speculator);

// Returns the blocks that kv_cache_bytes hold, as many for either lane, but no more than
// max_num_seqs sequences of the lane's max_model_len tokens need. The scorer gets what one such
// sequence or a full pass needs. INVALID_ARGUMENT for "kv_cache_bytes" that do not hold one
// sequence of max_model_len tokens beside the scorer's; UNIMPLEMENTED as RolloutMemory.
//
// Without kv_cache_bytes they are the blocks for which the free memory of the host, or of the GPU
// that computes, has room on this rank, beside the rest of the plan and a tenth that stays free,
// between those of one sequence and those of max_num_seqs sequences; where that memory is not
// known, the latter. A junior with a GPU of its own has what is free there. The ranks of a server
// take the fewest of them (JoinRanks).
//
// A lane with gpu_memory_utilization has the blocks for which that fraction of its GPU's size
// has room beside everything else that only the lane takes there: weights, their updates,
// activations, logits. RESOURCE_EXHAUSTED for "<lane>.gpu_memory_utilization" that do not hold one
// sequence of max_model_len tokens. The lanes run one after the other, so both together take less
// than the sum of their fractions. A lane without it has what is free beside the other.
absl::StatusOr<CacheBlocks> PlanCacheBlocks(const ModelConfig& senior, const ModelConfig* junior,
                                            const RolloutMemoryOptions& options);

// Returns the items of one rank: weights and KV cache of the lanes that it holds, the tensors of an
// update and the weights that are made of them, activations and logits of a pass, the buffers of
// lanes with graphs and what captured passes keep, tables of rotations. Caches and dense weights
// are exact; activations and tables are upper estimates, and so are packed weights by the padding
// of single maps, which are stored in stacks. The cache is that of PlanCacheBlocks. `junior` is
// nullptr without one. UNIMPLEMENTED for a model_type that no family has; errors of
// PlanCacheBlocks.
absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
