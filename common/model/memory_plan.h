// The memory that a configuration needs, computed from config.json before anything is allocated.
// Weights, caches, gradients and optimizer state are exact; activations are an upper estimate. The
// program itself (some 300 MB) and mapped weight files, which the system may drop, are not counted.
// No torch.
#ifndef TANDEM_COMMON_MODEL_MEMORY_PLAN_H_
#define TANDEM_COMMON_MODEL_MEMORY_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/model_config.h"
#include "common/model/parameter_spec.h"
#include "common/tensor/dtype.h"

namespace tandem {

struct MemoryPlan {
  struct Item {
    std::string name;  // "senior_kv_cache"
    int64_t bytes = 0;
  };
  std::vector<Item> items;

  int64_t total_bytes() const;
};

// Bound of the rows of logits that a rollout server holds at a time.
inline constexpr int64_t kRolloutLogitsBytes = 64 << 20;

struct RolloutMemoryOptions {
  int64_t num_slots = 0;           // of each lane's KV cache
  int64_t max_model_len = 0;       // tokens per slot; the models' own limits apply too
  int64_t max_batched_tokens = 0;  // in one forward pass
  DType dtype = DType::kFloat32;   // of weights, caches and activations
  // A lane's model is shared out among the first so many ranks of the server.
  int64_t senior_ranks = 1;
  int64_t junior_ranks = 1;
  int64_t rank = 0;  // whose memory it is; rank 0 receives new weights
};

// Of one rank. `junior` may be nullptr. UNIMPLEMENTED for a family that is not there.
absl::StatusOr<MemoryPlan> RolloutMemoryPlan(const ModelConfig& senior, const ModelConfig* junior,
                                             const RolloutMemoryOptions& options);

// A model that a trainer holds beside the one that it trains.
struct FrozenModel {
  std::string name;  // "reference"
  ModelConfig config;
};

// Among how many ranks of a server each part of a model in training is shared out. What a rank then
// holds is the average: the first and the last stage of a pipeline hold more.
struct MemoryShares {
  int64_t weights = 1;
  int64_t gradients = 1;
  int64_t optimizer = 1;
  int64_t activations = 1;
  // Blocks of weights (an embedding, a layer) that are gathered at a time.
  int64_t gathered_blocks = 0;
};

struct TrainingMemoryOptions {
  HeadKind head = HeadKind::kLm;  // kLm: a trainer; kValue: a critic
  bool untie_embeddings = false;
  std::vector<std::string> freeze = {};
  std::vector<FrozenModel> frozen = {};
  int64_t micro_batch_tokens = 0;
  int64_t max_model_len = 0;       // a longer sequence than micro_batch_tokens has its own batch
  int64_t logits_chunk_bytes = 0;  // kLm
  DType dtype = DType::kFloat32;   // of the computation; weights are trained in float32
  MemoryShares shares = {};
};

// INVALID_ARGUMENT for "freeze"; UNIMPLEMENTED for a family that is not there.
absl::StatusOr<MemoryPlan> TrainingMemoryPlan(const ModelConfig& config,
                                              const TrainingMemoryOptions& options);

// RESOURCE_EXHAUSTED with the numbers when the plan needs more than `available_bytes`.
absl::Status CheckFits(const MemoryPlan& plan, int64_t available_bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_MEMORY_PLAN_H_
