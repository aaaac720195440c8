// The memory that one rank of a rollout server takes, before anything is loaded. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/base/memory_plan.h"
#include "common/model/model_config.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/lane_storage.h"
#include "services/rollout/engine/rank_layout.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// Bytes of logits that a lane computes at a time, if that is a row or more.
inline constexpr int64_t kLogitsBytes = 64 << 20;

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
  LaneStorage storage = {.dtype = DType::kFloat32, .weight_format = kernels::WeightFormat::kDense};
};

struct RolloutMemoryOptions {
  LaneMemoryOptions senior = {};
  LaneMemoryOptions junior = {};
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;  // in one forward pass
  int64_t kv_cache_bytes = 0;      // of both lanes, on all ranks; 0: see PlanCacheBlocks
  bool on_host = true;             // whether the CPU computes
  RankLayout layout = {};
  int64_t rank = 0;  // rank 0 receives new weights
};

// Returns the options of the memory on rank `rank`.
RolloutMemoryOptions ToMemoryOptions(const EngineOptions& options, int64_t rank);

// Returns the blocks that kv_cache_bytes hold, as many for either lane, but no more than
// max_num_seqs sequences of the lane's max_model_len tokens need; without it, those. The scorer
// gets what one such sequence or a full pass needs. The same on every rank. INVALID_ARGUMENT for
// "kv_cache_bytes" that do not hold one sequence of max_model_len tokens beside the scorer's;
// UNIMPLEMENTED as RolloutMemory.
absl::StatusOr<CacheBlocks> PlanCacheBlocks(const ModelConfig& senior, const ModelConfig* junior,
                                            const RolloutMemoryOptions& options);

// Returns the items of one rank: weights and KV cache of the lanes that it holds, the tensors of an
// update and the weights that are made of them, activations and logits of a pass. Caches and dense
// weights are exact; activations are an upper estimate, and so are packed weights by the padding of
// single maps, which are stored in stacks. `junior` is nullptr without one. UNIMPLEMENTED for a
// model_type that no family has; errors of PlanCacheBlocks.
absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
