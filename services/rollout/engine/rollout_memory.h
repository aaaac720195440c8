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

namespace tandem::rollout {

// Bytes of logits that a lane computes at a time, if that is a row or more.
inline constexpr int64_t kLogitsBytes = 64 << 20;

struct LaneMemoryOptions {
  int64_t max_model_len = 0;  // tokens per slot; the model's own limit applies, too
  LaneStorage storage = {.dtype = DType::kFloat32, .weight_format = kernels::WeightFormat::kDense};
};

struct RolloutMemoryOptions {
  LaneMemoryOptions senior = {};
  LaneMemoryOptions junior = {};
  int64_t num_slots = 0;           // of each lane's KV cache
  int64_t max_batched_tokens = 0;  // in one forward pass
  bool on_host = true;             // whether the CPU computes
  RankLayout layout = {};
  int64_t rank = 0;  // rank 0 receives new weights
};

// Returns the items of one rank: weights and KV cache of the lanes that it holds, the new weights
// of an update, activations and logits of a pass. Caches and dense weights are exact; activations
// are an upper estimate, and so are packed weights by the padding of single maps, which are stored
// in stacks. `junior` is nullptr without one. UNIMPLEMENTED for a model_type that no family has.
absl::StatusOr<MemoryPlan> RolloutMemory(const ModelConfig& senior, const ModelConfig* junior,
                                         const RolloutMemoryOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ROLLOUT_MEMORY_H_
