// The ModelRunner of a model, or of this rank's shard of it, with its KV cache, and with the
// speculator whose heads draft for the model. One per lane; used by one thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TORCH_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TORCH_RUNNER_H_

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/model/model.h"
#include "common/model/passes/kv_cache.h"
#include "common/ops/threads/pass_memory.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_update.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/images/image_rows.h"
#include "services/rollout/engine/models/decode_graphs.h"
#include "services/rollout/engine/models/device_sampler.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {

class TorchRunner : public ModelRunner {
 public:
  // Whether passes compute with the model's adapters, or as the model that they adapt: of two
  // lanes that share it, the senior does, and the junior does not.
  enum class Adapters { kOn, kOff };

  // Keys and values are stored in `cache_dtype`, float32 or bfloat16. `speculator` may be null; it
  // is on the model's device, reads its hidden states and drafts its token ids.
  // Passes run on `stream`, behind what the default stream of its device had to do, and behind the
  // host; lanes that share a model share it. Without one they run on the default stream, and Start
  // is Run. With `graph_tokens` passes of decoding of sequences of at most so many tokens run as
  // graphs (decode_graphs.h), which needs a stream, no speculator, and
  // DecodeGraphs::CheckSupported.
  TorchRunner(std::shared_ptr<Model> model, int64_t num_blocks, DType cache_dtype,
              std::unique_ptr<const speculator::Speculator> speculator = nullptr,
              Adapters adapters = Adapters::kOn, std::optional<c10::Stream> stream = std::nullopt,
              std::optional<int64_t> graph_tokens = std::nullopt);
  // Returns another stream of a GPU; none for a CPU.
  static std::optional<c10::Stream> NewStream(at::Device device);

  const Model& model() const { return *model_; }
  Model& model() { return *model_; }
  const speculator::Speculator* speculator() const { return speculator_.get(); }  // may be null

  // INTERNAL if libtorch throws; RESOURCE_EXHAUSTED if memory runs out; errors of Model::Decode.
  absl::Status Run(const Pass& pass, PassResults& results) override;
  bool RunsBehindTheHost() const override { return stream_.has_value(); }
  // Waits where a row is not drawn on the device (device_sampler.h), with a stream, too: no pass
  // follows such a one.
  absl::Status Start(const Pass& pass, PassResults& results) override;
  absl::Status Finish() override;
  // All ranks of a sharded model have the same hidden states, so one of them drafts alone. INTERNAL
  // if libtorch throws; RESOURCE_EXHAUSTED if memory runs out.
  absl::Status Draft(std::span<const DraftRequest> requests, int64_t count,
                     std::vector<int32_t>& drafts) override;
  // All ranks of a sharded model choose the same experts, so one of them answers alone. INTERNAL if
  // libtorch throws; RESOURCE_EXHAUSTED if memory runs out.
  absl::Status ReadRouting(std::span<const int32_t> blocks, int64_t count,
                           TokenExperts& experts) override;
  // Exchanges the weights of the speculator, which there is, with new ones, between two passes.
  void SwapSpeculator(const speculator::PreparedSpeculator& next) { next.SwapWith(*speculator_); }
  // Tells that the model's weights were replaced, between two passes.
  void OnNewWeights() {
    image_rows_.Forget();
    if (graphs_.has_value()) graphs_->Forget();
  }
  // Run on a rank whose logits another rank gathers.
  absl::Status Follow(std::span<const BlockCopy> copies, std::span<const DecodeInput> sequences);

 private:
  // Fills image_rows_of_inputs_.
  void ReadImageRows(std::span<const DecodeInput> sequences);
  // Returns logits in float32 and contiguous, in memory that the next call may use again.
  at::Tensor OnHost(const at::Tensor& logits);
  // Returns RowStatistics of rows that the host draws, in memory of the host: they are there when
  // OnHost returns.
  at::Tensor SendStatistics(const at::Tensor& logits, std::span<const OutputRow> rows);
  // Computes a pass and draws from its rows; without `results` the hidden states alone.
  absl::Status Compute(const Pass& pass, PassResults* results, DeviceDraws& draws);
  // Lets operations of this thread run on the runner's stream while `guard` lives.
  void EnterStream(std::optional<c10::StreamGuard>& guard);

  // Waits for all that the stream has to do.
  void WaitForStream();

  std::shared_ptr<Model> model_;
  const Adapters adapters_;
  const std::optional<c10::Stream> stream_;
  std::optional<c10::Event> before_;  // behind the work of the default stream that a pass needs
  std::array<DeviceDraws, 2> draws_;  // of the pass that was started last, and of the one before
  size_t newest_ = 0;                 // in draws_
  bool has_two_ = false;              // whether both passes have started and not finished
  bool has_rows_ = false;             // whether the host waits for rows of the last one
  KvCache cache_;
  std::optional<DecodeGraphs> graphs_;
  ImageRows image_rows_;
  const std::unique_ptr<const speculator::Speculator> speculator_;
  ops::PassMemory memory_;
  // The vision tower's rows for the images of each sequence in the pass that runs. Empty if no
  // sequence has images.
  std::vector<std::vector<at::Tensor>> image_rows_of_inputs_;
  // A GPU copies into pinned memory many times faster than into other: 39 MB in 0.7 and in 31 ms.
  at::Tensor host_logits_;
  at::Tensor hidden_;  // with a speculator: of the last pass, [number of its rows, H]
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TORCH_RUNNER_H_
