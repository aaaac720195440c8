// The layout of a rollout server: each lane's model is sharded, by heads and rows of the
// vocabulary, over the first ranks of the server, which hold a shard of every expert or whole
// experts. The two lanes may have different numbers of ranks. No torch.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANK_LAYOUT_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANK_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/model/config/model_config.h"
#include "common/model/parameters/expert_shard.h"

namespace tandem::rollout {

struct RankLayout {
  int64_t tensor_parallel_size = 1;         // ranks of the senior
  int64_t junior_tensor_parallel_size = 1;  // ranks of the junior
  // The CUDA device of the junior on each of its ranks; empty: the device of the senior.
  std::vector<int32_t> junior_gpu_devices = {};
  // Whether the ranks of senior and junior hold whole experts, in place of shards of each.
  bool enable_expert_parallel = false;
  bool junior_enable_expert_parallel = false;
};

// Returns the experts that rank `rank` of the `ranks` of a lane holds.
inline ExpertShard ExpertsOfRank(bool enable_expert_parallel, int64_t rank, int64_t ranks) {
  if (!enable_expert_parallel || ranks == 1) return {};
  return {.index = rank, .count = ranks, .whole = true};
}

// INVALID_ARGUMENT, with the numbers, if the server's ranks are not as many as the layout needs, or
// do not divide a model or its experts. `junior` is nullptr without a junior.
absl::Status CheckRankLayout(const RankLayout& layout, const ModelConfig& senior,
                             const ModelConfig* junior, int64_t world_size);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANK_LAYOUT_H_
