// The memory that one rank of a rollout server takes, before anything is loaded. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/base/memory_plan.h"
#include "common/model/model_config.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/rank_layout.h"

namespace tandem::rollout {

// Bytes of logits that a lane computes at a time, if that is a row or more.
inline constexpr int64_t kLogitsBytes = 64 << 20;

// The blocks of each lane's KV cache.
struct CacheBlocks {
  int64_t generator = 0;  // of sequences that are being written
  int64_t scorer = 0;     // of sequences that are being scored

  int64_t total() const { return generator + scorer; }
};

// Returns the blocks for max_num_seqs sequences of max_model_len tokens, and those of the scorer
// for one such sequence or a full pass.
CacheBlocks PlanCacheBlocks(int64_t max_num_seqs, int64_t max_model_len,
                            int64_t max_batched_tokens);

struct RolloutMemoryOptions {
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;       // the models' own limits apply too
  int64_t max_batched_tokens = 0;  // in one forward pass
  DType dtype = DType::kFloat32;   // of weights, caches and activations
  bool on_host = true;             // whether the CPU computes
  RankLayout layout = {};
  int64_t rank = 0;  // rank 0 receives new weights
};

// Returns the items of one rank: weights and KV cache of the lanes that it holds, the new weights
// of an update, activations and logits of a pass. Weights and caches are exact, activations an
// upper estimate. `junior` is nullptr without one. UNIMPLEMENTED for a model_type that no family
// has.
absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
