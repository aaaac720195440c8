// One update of the weights of the senior, and of its speculator, on rank 0: the engine's part of a
// weight transfer (common/weights/staged_weight_receiver.h).
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_SENIOR_UPDATE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_SENIOR_UPDATE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_update.h"
#include "common/weights/gpu/gpu_intake.h"
#include "common/weights/staged_weight_receiver.h"
#include "services/rollout/engine/ranks/shard_weights.h"

namespace tandem::rollout {

// Checks and packs tensors while the stream brings them, on the thread that adds them, without a
// hand of the engine thread. The swap is the engine's.
class SeniorUpdate : public NextWeights {
 public:
  // Puts the update in force; blocks.
  using Swap = std::function<absl::Status(SeniorUpdate& update, const WeightManifest& manifest,
                                          const CallScope& call)>;

  // `senior` and its `speculator`, which may be null, outlive the update. `keeps_tensors`: for a
  // swap that gives the senior's whole tensors to other ranks. `intake`: the stream of the senior's
  // GPU on which tensors are copied from the memory of other processes' GPUs, if there is any.
  SeniorUpdate(const Model& senior, const speculator::Speculator* speculator, bool keeps_tensors,
               std::optional<c10::Stream> intake, Swap swap);

  // INVALID_ARGUMENT names a tensor that does not fit; RESOURCE_EXHAUSTED if memory runs out.
  absl::Status Add(const WeightSpec& spec, TensorBytes bytes) override;
  // The same, and errors of GpuIntake.
  absl::Status AddShared(const WeightSpec& spec, absl::Span<const SharedRange> ranges) override;
  absl::StatusOr<std::vector<ReadTensor>> TakeRead() override;
  // Errors of PreparedWeights::CheckComplete and of the swap.
  absl::Status Apply(const WeightManifest& manifest, const CallScope& call) override;

  // For Model::Adopt. Complete when the swap is called; null if the update leaves the senior as it
  // is.
  PreparedWeights* weights() { return weights_.get(); }
  // The speculator's; null if the update has none. Complete as the manifest is checked.
  const speculator::PreparedSpeculator* speculator() const { return next_speculator_.get(); }
  // The senior's that were added; empty unless they are kept, and after DropTensors. Those that are
  // in memory of another process's GPU stay there.
  const std::vector<KeptTensor>& tensors() const { return tensors_; }
  void DropTensors() { tensors_.clear(); }

 private:
  // Makes what takes the tensors of a component, on the current stream.
  absl::Status Prepare(const WeightSpec& spec);
  absl::Status Pack(const WeightSpec& spec, const at::Tensor& tensor);
  void Keep(KeptTensor tensor);

  const Model& senior_;
  const speculator::Speculator* const speculator_;
  const bool keeps_tensors_;
  const Swap swap_;
  std::unique_ptr<PreparedWeights> weights_;  // nullptr before the first tensor of the senior
  std::vector<KeptTensor> tensors_;
  std::unique_ptr<speculator::PreparedSpeculator> next_speculator_;
  std::optional<GpuIntake> intake_;  // last: its copies end before what they fill
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_SENIOR_UPDATE_H_
