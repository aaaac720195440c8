// The last step of a weight transfer (common/weights/weight_transfer.h): the received bytes become
// tensors. In a multi-rank server rank 0 sends them to the ranks that hold the other shards of the
// model, one tensor at a time, so that no other rank holds all of them.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SHARD_WEIGHTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/ranks/communicator.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weight_transfer.h"

namespace tandem::rollout {

// Returns the tensors that `manifest` describes. They are valid while `stream` is, and must not be
// written.
absl::StatusOr<NamedTensors> TensorsIn(const WeightManifest& manifest,
                                       absl::Span<const std::byte> stream);

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
