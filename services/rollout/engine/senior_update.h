// One update of the senior's weights on rank 0: the engine's part of a weight transfer
// (common/weights/staged_weight_receiver.h).
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_SENIOR_UPDATE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_SENIOR_UPDATE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "common/model/model.h"
#include "common/model/prepared_weights.h"
#include "common/tensor/named_tensors.h"
#include "common/weights/staged_weight_receiver.h"

namespace tandem::rollout {

// Checks and packs tensors while the stream brings them, on the thread that adds them, without a
// hand of the engine thread. The swap is the engine's.
class SeniorUpdate : public NextWeights {
 public:
  // Puts the update in force on the engine thread; blocks.
  using Swap = std::function<absl::Status(SeniorUpdate& update, const WeightManifest& manifest,
                                          const CallScope& call)>;

  // `senior` outlives the update. `keeps_tensors`: for a swap that sends the whole tensors to other
  // ranks.
  SeniorUpdate(const Model& senior, bool keeps_tensors, Swap swap);

  // INVALID_ARGUMENT names a tensor that does not fit; RESOURCE_EXHAUSTED if memory runs out.
  absl::Status Add(const WeightSpec& spec, TensorBytes bytes) override;
  // Errors of PreparedWeights::CheckComplete and of the swap.
  absl::Status Apply(const WeightManifest& manifest, const CallScope& call) override;

  // For Model::Adopt. Complete when the swap is called.
  PreparedWeights& weights() { return *weights_; }
  // Those that were added; empty unless they are kept.
  const NamedTensors& tensors() const { return tensors_; }

 private:
  const Model& senior_;
  const bool keeps_tensors_;
  const Swap swap_;
  std::unique_ptr<PreparedWeights> weights_;  // nullptr before the first tensor
  NamedTensors tensors_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_SENIOR_UPDATE_H_
