// The sharded optimizer: AdamW over the parameter values that one rank updates, with the gradient
// norm and the checkpoint of the whole model. Every strategy trains with it:
//
//   `single`    one shard per parameter, which is the whole parameter;
//   `zero`      1/n of every block's flat buffer, where n is the number of ranks;
//   `megatron`  1/n of the buffers of this rank's blocks, where n ranks hold the same parameters
//               (use_distributed_optimizer), or all of them.
//
// The folder: shard_plan.h finds the parameters inside a shard of a buffer, this file updates them,
// optimizer_state.h writes and reads their moments, so that any layout loads any other's.
#ifndef TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARDED_OPTIMIZER_H_
#define TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARDED_OPTIMIZER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/model.h"
#include "common/optim/adamw.h"
#include "common/optim/optimizer_options.h"
#include "common/parallel/optimizer/optimizer_state.h"
#include "common/parallel/strategy.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

// Whether any parameter in a buffer (Parameter::buffer) trains.
bool BufferTrains(const Model& model, int64_t buffer);

// Makes the gradients of the trainable parameters of a buffer views of `gradients`, which has the
// buffer's layout.
void ViewGradients(const Model& model, int64_t buffer, const at::Tensor& gradients);

// The values of one parameter that this rank updates.
struct OptimizerShard {
  ParameterRange range;
  at::Tensor values, gradient;  // range.numel values each, float32
  // Whether this rank counts the shard in the gradient norm and writes it to checkpoints. Exactly
  // one of the ranks that update the same values does.
  bool counts = true;
};

// Returns the trainable parameters' values in shard `index` of `shards` of a buffer. `values` and
// `gradients` are that shard, flat.
std::vector<OptimizerShard> ShardsOfBuffer(const Model& model, int64_t buffer, int64_t shards,
                                           int64_t index, const at::Tensor& values,
                                           const at::Tensor& gradients);

class ShardedOptimizer {
 public:
  // `ranks` are all ranks that train the model; every rank makes the same calls. With `on_cpu` the
  // moments and a copy of the values live, and are updated, on the CPU, wherever the shards are.
  // INVALID_ARGUMENT if no parameter of the model trains.
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(
      std::vector<OptimizerShard> shards, const OptimizerOptions& options, const Model& model,
      std::shared_ptr<ranks::Communicator> ranks, bool on_cpu = false);

  // Strategy::OptimizerStep. Calls `after_update` when this rank's shards are updated.
  absl::StatusOr<OptimizerReport> Step(Model& model, const OptimizerOverrides& overrides,
                                       absl::FunctionRef<void()> after_update);
  int64_t steps() const { return optimizer_->steps(); }
  void Reset() { optimizer_->Reset(); }
  // Must be called after the shards' values were replaced by others than Step's.
  void OnValuesReplaced();

  // As Strategy::SaveOptimizer, CopyOptimizer and LoadOptimizer.
  absl::Status Save(const std::string& directory) const;
  absl::StatusOr<OptimizerWriter> Copy(TensorCopies& copies) const;
  absl::Status Load(const std::string& directory);

 private:
  ShardedOptimizer(std::vector<OptimizerShard> shards, const OptimizerOptions& options,
                   std::vector<std::string> trained, std::shared_ptr<ranks::Communicator> ranks,
                   bool on_cpu);
  double GradientNorm() const;
  // Returns the ranges and the state that this rank writes into checkpoints.
  std::pair<std::vector<ParameterRange>, NamedTensors> CountedState() const;
  void Update(double learning_rate, const OptimizerOptions& options);

  const OptimizerOptions options_;
  const std::shared_ptr<ranks::Communicator> ranks_;
  const std::vector<OptimizerShard> shards_;
  const std::vector<std::string> trained_;  // the whole model's trainable parameters
  std::vector<at::Tensor> gradients_;       // of the shards
  std::vector<at::Tensor> masters_;         // the shards' values, or copies on the CPU
  std::unique_ptr<training::AdamW> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_OPTIMIZER_SHARDED_OPTIMIZER_H_
