// The ranks of a rollout server. Rank 0 schedules, samples and serves; the others hold shards of
// the models, and compute the passes that rank 0 announces.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_ENGINE_RANKS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_ENGINE_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/parameters/parameter.h"
#include "common/ranks/communicator.h"
#include "common/ranks/server_ranks.h"
#include "services/rollout/engine/rollout_memory.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// The process group of one lane, as one rank sees it.
struct LaneRanks {
  std::shared_ptr<ranks::Communicator> group;  // nullptr on a rank outside of the group
  // The same ranks for new weights, on the host beside the passes, without a time limit, as a rank
  // packs the whole model; null unless it shards a senior.
  std::shared_ptr<ranks::Communicator> weights_group = nullptr;
  Placement placement;  // of the lane's model; holds no block outside of the group

  bool holds() const { return group != nullptr; }
  bool sharded() const { return placement.shard_count > 1; }
};

struct EngineRanks {
  std::shared_ptr<ranks::ServerRanks> server;
  LaneRanks senior, junior;
  CacheBlocks blocks;  // of the lanes' KV caches, the same on every rank
};

// Joins the other ranks, and agrees with them on the size of the KV cache; blocks.
// FAILED_PRECONDITION if configurations of the ranks differ, or for a device that is missing;
// INVALID_ARGUMENT for an impossible layout; errors of PlanCacheBlocks. May throw c10::Error.
absl::StatusOr<EngineRanks> JoinRanks(const EngineOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_ENGINE_RANKS_H_
