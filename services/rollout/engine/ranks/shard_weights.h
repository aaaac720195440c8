// The last step of a weight transfer (common/weights/weight_transfer.h) in a multi-rank server: the
// ranks that hold the other shards of the model get whole tensors, one at a time, so that no rank
// holds all of them. What rank 0 has kept on the host it sends; what is still in memory of the
// sender's GPUs every rank reads there. Those ranks pack their shards beside the weights that
// serve, and all ranks swap between the same two passes.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "common/base/machine/gpu_memory.h"
#include "common/model/model.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/ranks/communicator.h"
#include "common/ranks/server_ranks.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/tensor_stager.h"
#include "common/weights/word_sums.h"

namespace tandem::rollout {

// The names of the commands: the ranks agree whether all of them can open GpuMemory, a vector; the
// tensors of a RankedWeights come now; the weights that came last are put in force now (an
// AdoptedWeights).
inline constexpr char kOpenMemoryCommand[] = "open memory";
inline constexpr char kWeightsCommand[] = "weights";
inline constexpr char kAdoptCommand[] = "adopt weights";

// A whole tensor that rank 0 keeps for the other ranks.
struct KeptTensor {
  WeightSpec spec;
  at::Tensor values;                     // on the host; undefined: the bytes are in `ranges`
  std::vector<SharedRange> ranges = {};  // of PeerMemory, one behind the other
  WordSums sums = {};                    // of the bytes there, as they have been verified
};

// A tensor for the other ranks.
struct RankedTensor {
  struct Range {
    size_t memory;  // among those of the RankedWeights
    int64_t offset, size;
  };
  WeightSpec spec;
  std::vector<Range> ranges = {};  // where every rank reads it; empty: rank 0 sends it
  WordSums sums = {};              // of what is read there
};

// The tensors, in this order.
struct RankedWeights {
  std::vector<RankedTensor> tensors;
  std::vector<std::vector<GpuMemory>> memories = {};  // each as PeerMemory::shared
};
struct AdoptedWeights {};

// Describes those of `tensors` that are parameters of `model`.
RankedWeights WeightsToSend(const std::vector<KeptTensor>& tensors, const Model& model);

// Sends the tensors that are on the host from rank 0 of `group`, and waits until the other ranks
// have packed all of them; collective, with a ShardUpdate on each of these. `weights` is
// WeightsToSend of `tensors`. The error of another rank, if one has any, as AgreeByName. May throw
// c10::Error.
absl::Status SendWeights(const RankedWeights& weights, const std::vector<KeptTensor>& tensors,
                         ranks::Communicator& group);

// An update on a rank other than 0: takes the tensors and packs this rank's shard of them, on a
// thread of its own with a low priority.
class ShardUpdate {
 public:
  // Ends the process of `server` on all ranks if the transfer breaks; an error of reading or
  // packing is that of SendWeights: DATA_LOSS for memory that has changed, errors of PeerMemory and
  // of PreparedWeights. `intake`: the stream of the model's GPU on which tensors are copied from
  // memory of other processes' GPUs, if there is any. The references outlive the update; `group`
  // has no other use meanwhile.
  ShardUpdate(const RankedWeights& weights, ranks::Communicator& group, const Model& model,
              ranks::ServerRanks& server, std::optional<c10::Stream> intake);
  // Waits for the transfer.
  ~ShardUpdate() = default;
  ShardUpdate(const ShardUpdate&) = delete;
  ShardUpdate& operator=(const ShardUpdate&) = delete;

  // Puts the weights in force in `model`, which is that of the constructor; after SendWeights on
  // rank 0 was OK. The update has the former weights then.
  void AdoptInto(Model& model);

 private:
  absl::Status Take(const RankedWeights& weights, ranks::Communicator& group, const Model& model,
                    std::optional<c10::Stream> intake);

  std::unique_ptr<PreparedWeights> weights_;
  std::jthread thread_;  // last: it uses what is above
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_SHARD_WEIGHTS_H_
