// The last step of a weight transfer (common/weights/weight_transfer.h) in a multi-rank server:
// rank 0 sends the whole tensors to the ranks that hold the other shards of the model, one at a
// time, so that no other rank holds all of them. Those ranks pack their shards beside the weights
// that serve, and all ranks swap between the same two passes.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_

#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "common/model/model.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/ranks/communicator.h"
#include "common/ranks/server_ranks.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem::rollout {

// The names of the commands: the tensors of a RankedWeights come now; the weights that came last
// are put in force now (an AdoptedWeights).
inline constexpr char kWeightsCommand[] = "weights";
inline constexpr char kAdoptCommand[] = "adopt weights";

// The tensors that are sent, in this order.
struct RankedWeights {
  std::vector<WeightSpec> tensors;
};
struct AdoptedWeights {};

// Describes those of `tensors` that are parameters of `model`. Tensors are whole, of any floating
// type.
RankedWeights WeightsToSend(const NamedTensors& tensors, const Model& model);

// Sends the tensors from rank 0 of `group`; collective, with a ShardUpdate on each of the other
// ranks. May throw c10::Error.
void SendWeights(const RankedWeights& weights, const NamedTensors& tensors,
                 ranks::Communicator& group);

// An update on a rank other than 0: receives the tensors and packs this rank's shard of them, on a
// thread of its own with a low priority.
class ShardUpdate {
 public:
  // Ends the process of `server` on all ranks if the transfer or the packing fails. The references
  // outlive the update; `group` has no other use meanwhile.
  ShardUpdate(const RankedWeights& weights, ranks::Communicator& group, const Model& model,
              ranks::ServerRanks& server);
  // Waits for the transfer.
  ~ShardUpdate() = default;
  ShardUpdate(const ShardUpdate&) = delete;
  ShardUpdate& operator=(const ShardUpdate&) = delete;

  // Waits until all tensors have been packed, and puts them in force in `model`, which is that of
  // the constructor. The update has the former weights then.
  void AdoptInto(Model& model);

 private:
  absl::Status Receive(const RankedWeights& weights, ranks::Communicator& group,
                       const Model& model);

  std::unique_ptr<PreparedWeights> weights_;
  std::jthread thread_;  // last: it uses what is above
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_
