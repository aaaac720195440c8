// New weights on the way from rank 0 to the ranks that hold the other parts of a model. A tensor at
// a time: no other rank ever holds all of them.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_

#include <string>
#include <vector>

#include "common/model/model.h"
#include "common/parallel/communicator.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem::rollout {

// The name of the command whose request is a RankedWeights.
inline constexpr char kWeightsCommand[] = "weights";

// What comes, in this order.
struct RankedWeights {
  std::vector<WeightSpec> tensors;
};

// Of `tensors`, whole ones of any floating type, those that are parameters of `model`.
RankedWeights Announced(const NamedTensors& tensors, const Model& model);

// Rank 0 of `group` sends them; collective, with ReceiveWeights on the others. May throw
// c10::Error.
void SendWeights(const RankedWeights& weights, const NamedTensors& tensors,
                 parallel::Communicator& group);
// Copies this rank's part of each into `model`.
void ReceiveWeights(const RankedWeights& weights, parallel::Communicator& group, Model& model);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_
