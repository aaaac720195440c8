// The ModelRunner of a model, or of this rank's shard of it, with its KV cache. One per lane; used
// by one thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/kv_cache.h"
#include "common/model/model.h"
#include "services/rollout/engine/model_runner.h"

namespace tandem::rollout {

class TorchRunner : public ModelRunner {
 public:
  TorchRunner(std::unique_ptr<Model> model, int64_t num_slots, int64_t max_model_len);

  const Model& model() const { return *model_; }
  Model& model() { return *model_; }

  absl::StatusOr<int64_t> AllocateSlot() override { return cache_.Allocate(); }
  void FreeSlot(int64_t slot) override { cache_.Free(slot); }
  // INTERNAL if libtorch throws; RESOURCE_EXHAUSTED if memory runs out.
  absl::Status Truncate(int64_t slot, int64_t length) override;
  absl::Status CopyPrefix(int64_t from, int64_t to, int64_t length) override;
  // `sink` is empty on a rank whose logits another rank gathers.
  absl::Status Forward(std::span<const RunnerInput> inputs, const RowSink& sink) override;

 private:
  std::unique_ptr<Model> model_;
  KvCache cache_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_
