// The last step of a weight transfer (common/weights/weight_transfer.h) in a multi-rank server:
// rank 0 sends the whole tensors to the ranks that hold the other shards of the model, one at a
// time, so that no other rank holds all of them. Those ranks convert and pack their shards in
// between, on their engine threads: a sharded senior stands still meanwhile.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_

#include <string>
#include <vector>

#include "common/model/model.h"
#include "common/ranks/communicator.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem::rollout {

// The name of the command whose request is a RankedWeights.
inline constexpr char kWeightsCommand[] = "weights";

// The tensors that are sent, in this order.
struct RankedWeights {
  std::vector<WeightSpec> tensors;
};

// Describes those of `tensors` that are parameters of `model`. Tensors are whole, of any floating
// type.
RankedWeights WeightsToSend(const NamedTensors& tensors, const Model& model);

// Sends the tensors from rank 0 of `group`; collective, with ReceiveWeights on the other ranks. May
// throw c10::Error.
void SendWeights(const RankedWeights& weights, const NamedTensors& tensors,
                 ranks::Communicator& group);
// Receives the tensors, and copies this rank's shard of each into `model`.
void ReceiveWeights(const RankedWeights& weights, ranks::Communicator& group, Model& model);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_
