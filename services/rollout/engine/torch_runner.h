// The ModelRunner of a model, or of this rank's shard of it, with its KV cache. One per lane; used
// by one thread.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/model/kv_cache.h"
#include "common/model/model.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/model_runner.h"

namespace tandem::rollout {

class TorchRunner : public ModelRunner {
 public:
  // Keys and values are stored in `cache_dtype`, float32 or bfloat16.
  TorchRunner(std::unique_ptr<Model> model, int64_t num_blocks, DType cache_dtype);

  const Model& model() const { return *model_; }
  Model& model() { return *model_; }

  // INTERNAL if libtorch throws; RESOURCE_EXHAUSTED if memory runs out; errors of Model::Decode.
  absl::Status Run(const Pass& pass, PassResults& results) override;
  // The same on a rank whose logits another rank gathers: of the rows only the indices are read.
  absl::Status Follow(const Pass& pass);

 private:
  absl::Status Compute(const Pass& pass, PassResults* results);

  std::unique_ptr<Model> model_;
  KvCache cache_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TORCH_RUNNER_H_
