// The processes of a rollout server. Rank 0 schedules, samples and serves; the others hold parts of
// the models and compute the passes that rank 0 announces.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_RANKS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/parameter.h"
#include "common/parallel/communicator.h"
#include "common/parallel/server_ranks.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// The ranks of one lane, as one of the server's ranks sees them.
struct LaneRanks {
  std::shared_ptr<parallel::Communicator> group;  // nullptr where this rank is none of them
  Placement placement;                            // of the lane's model; of none: holds no block

  bool holds() const { return group != nullptr; }
  bool shared() const { return placement.shard_count > 1; }
};

struct EngineRanks {
  std::shared_ptr<parallel::ServerRanks> server;
  LaneRanks senior, junior;
};

// Joins the other ranks (blocks). FAILED_PRECONDITION if they have other configurations;
// INVALID_ARGUMENT for a layout that cannot be; FAILED_PRECONDITION for a device that is not there.
// May throw c10::Error.
absl::StatusOr<EngineRanks> JoinRanks(const EngineOptions& options);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_ENGINE_RANKS_H_
