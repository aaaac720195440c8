// The strategy `megatron`: training over a mesh of ranks as in Megatron-LM
// (https://arxiv.org/abs/2104.04473). Tensor ranks divide layers by heads and their norms by tokens
// (tensor and sequence parallel), pipeline stages divide the layers, context ranks divide sequences
// by tokens, and replicas divide the micro-batches (data parallel). Among the context ranks of all
// replicas, groups of expert parallel ranks divide the experts: tokens travel to them and back
// (common/ops/experts/expert_exchange.h).
//
// A rank holds its shard of the blocks of its stage. Replica d of n runs the micro-batches
// d, d + n, ... through its pipeline. With expert parallelism all replicas run as many
// micro-batches, of which the last may be empty, so that their exchanges of tokens meet. Functions
// of hidden states run on the tensor and context ranks of the last stage. Each of these has the
// hidden states of all tokens and computes a shard of the vocabulary: the tensor rank's, divided
// among its context ranks. So a loss sees whole sequences in every layout, and exchanges row
// statistics alone.
//
// Gradients of parameters that tensor ranks hold whole are summed over the tensor ranks, and all
// gradients over the context and data ranks that hold the parameters. The optimizer's state is
// sharded over the latter, as in stage 1 of ZeRO, or every rank updates all parameters that it
// holds. The first and the last stage both hold an embedding that is the head, too, and sum its
// gradients.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_STRATEGY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel/megatron/megatron_options.h"
#include "common/parallel/megatron/parallel_mesh.h"
#include "common/parallel/megatron/stage_pass.h"
#include "common/parallel/memory/recompute.h"
#include "common/parallel/optimizer/sharded_optimizer.h"
#include "common/parallel/strategy.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

class MegatronStrategy : public Strategy {
 public:
  MegatronStrategy(const MegatronOptions& options, std::shared_ptr<ranks::Communicator> world,
                   Recompute recompute = Recompute::kNone, bool outputs_read_images = false)
      : megatron_(options),
        recompute_(recompute),
        outputs_read_images_(outputs_read_images),
        world_(std::move(world)) {}

  // Returns the errors of CheckMegatronOptions, too.
  absl::Status LoadModel(const std::string& directory, const LoadOptions& options) override;
  // The model with the blocks of this rank's stage.
  Model& model() override { return *model_; }
  ranks::Communicator& ranks() override { return *world_; }
  absl::Status BuildOptimizer(const OptimizerOptions& options) override;
  int64_t data_parallel_size() const override {
    return world_->size() / megatron_.model_parallel_size();
  }
  bool computes_output() const override { return is_last_stage(); }
  OutputShard output_shard() override;
  at::Tensor OutputGradient() override;
  absl::StatusOr<std::vector<std::vector<double>>> Forward(int64_t count, InputFunction input,
                                                           OutputFunction output) override;
  absl::StatusOr<std::vector<std::vector<double>>> ParallelMap(
      int64_t count,
      absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute) override;
  absl::Status ForwardBackward(int64_t count, InputFunction input, LossFunction loss) override;
  at::Tensor Gradient(absl::string_view parameter) const override;
  absl::Status Reduce(absl::Span<double> sums, absl::Span<double> maxima) override;
  absl::Status ReduceTensor(at::Tensor& sums) override;
  absl::StatusOr<OptimizerReport> OptimizerStep(const OptimizerOverrides& overrides) override;
  std::vector<Holding> Holdings(const Parameter& parameter, int wanted_by) const override;

 protected:
  ShardedOptimizer& optimizer() const override { return *optimizer_; }

 private:
  // A flat buffer (Model::BlockBuffers) that this rank holds, and the shard of it that it updates.
  struct Buffer {
    int64_t index = 0;
    // The ranks that hold the same parameters.
    std::shared_ptr<ranks::Communicator> holders;
    at::Tensor parameters, parameter_shard;
    bool trains = false;
    at::Tensor gradients, gradient_shard;
  };

  bool is_last_stage() const { return mesh_->at.pipeline + 1 == mesh_->shape.pipeline; }
  // Whether this rank's counts are those of its replica.
  bool speaks_for_replica() const {
    return is_last_stage() && mesh_->at.tensor == 0 && mesh_->at.context == 0;
  }
  // Whether this rank holds the embedding as a copy, for the head of the last stage.
  bool holds_copy(int64_t block) const {
    return block == 0 && is_last_stage() && mesh_->at.pipeline > 0;
  }
  LoadOptions PartialLoad(const LoadOptions& options, const ModelConfig& config) const;
  // Returns the shard that this rank updates of a tensor that `holders` hold.
  at::Tensor ShardOf(const at::Tensor& flat, const ranks::Communicator& holders) const;
  TokenRange OutputTokensHere() const;
  // Returns the rows of token ids that this rank computes: a view of the head's rows that it holds.
  ops::MatrixRows OutputRowsOf(const ops::MatrixRows& head) const;

  // Returns this replica's micro-batches among 0 .. count-1, and with expert parallelism empty ones
  // up to the number of the first replica; or the first rank's error.
  absl::StatusOr<std::vector<RaggedBatch>> Inputs(int64_t count, InputFunction input) const;
  int64_t GlobalIndex(int64_t micro_batch) const {
    return micro_batch * data_parallel_size() + mesh_->at.data;
  }
  Stage MakeStage() const;

  void ReduceGradients();
  // Sums the gradients of parameters that all tensor ranks hold whole.
  void SumOverTensorRanks();
  void GatherUpdate();
  // Returns the stage that runs a block.
  int StageOf(int64_t block) const;

  const MegatronOptions megatron_;
  const Recompute recompute_;
  const bool outputs_read_images_;
  const std::shared_ptr<ranks::Communicator> world_;
  std::unique_ptr<ParallelMesh> mesh_;
  // nullptr if one rank computes the output.
  std::shared_ptr<ops::TensorParallelGroup> output_group_;
  std::unique_ptr<Model> model_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_STRATEGY_H_
