// Training over a mesh of ranks as in Megatron-LM (https://arxiv.org/abs/2104.04473): layers cut by
// heads with norms cut by tokens (tensor and sequence parallel), layers shared out among stages
// (pipeline), sequences cut by tokens (context parallel), micro-batches shared out among replicas
// (data parallel).
//
// What a rank holds are the blocks of its stage, its shard of each. Replica d of n takes the
// micro-batches d, d + n, ... through its pipeline. Functions of hidden states run on the tensor
// and context ranks of the last stage, each of which has the hidden states of all tokens and
// computes a part of the vocabulary: a tensor rank's shard, cut again by its context rank. So row
// statistics are all that a loss sends, and it sees whole sequences in every layout.
//
// Gradients of what tensor ranks hold alike are summed over them, and all over the context and data
// ranks, between which the optimizer's state is shared out as in stage 1 of ZeRO; or every rank
// updates all that it holds. The first and the last stage hold an embedding that is the head too,
// and sum its gradients.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_STRATEGY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel/communicator.h"
#include "common/parallel/megatron_options.h"
#include "common/parallel/parallel_mesh.h"
#include "common/parallel/piece_optimizer.h"
#include "common/parallel/stage_pass.h"
#include "common/parallel/strategy.h"

namespace tandem::parallel {

class MegatronStrategy : public Strategy {
 public:
  MegatronStrategy(const MegatronOptions& options, std::shared_ptr<Communicator> world)
      : megatron_(options), world_(std::move(world)) {}

  // With the errors of CheckMegatronOptions.
  absl::Status LoadModel(const std::string& directory, const LoadOptions& options) override;
  // Holds the blocks of this rank's stage.
  Model& model() override { return *model_; }
  Communicator& ranks() override { return *world_; }
  absl::Status BuildOptimizer(const OptimizerOptions& options) override;
  int64_t data_parallel_size() const override {
    return world_->size() / megatron_.model_parallel_size();
  }
  bool computes_output() const override { return is_last_stage(); }
  OutputShard output_shard() override;
  absl::StatusOr<std::vector<std::vector<double>>> Forward(int64_t count, InputFunction input,
                                                           OutputFunction output) override;
  absl::StatusOr<std::vector<std::vector<double>>> ShareOut(
      int64_t count,
      absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute) override;
  absl::Status ForwardBackward(int64_t count, InputFunction input, LossFunction loss) override;
  at::Tensor Gradient(absl::string_view parameter) const override;
  absl::Status Reduce(absl::Span<double> sums, absl::Span<double> maxima) override;
  absl::StatusOr<OptimizerReport> OptimizerStep() override;
  int64_t optimizer_steps() const override { return optimizer_->steps(); }
  absl::Status ResetOptimizer() override;
  absl::Status VisitParameters(TensorVisitor visit) override;
  absl::Status ScatterParameters(const NamedTensors& parameters) override;
  absl::Status SaveOptimizer(const std::string& directory) override;
  absl::Status LoadOptimizer(const std::string& directory) override;

 private:
  // A block that this rank holds: flat buffers, and the parts of them that it updates.
  struct Block {
    int64_t index = 0;
    at::Tensor parameters, parameter_part;
    bool trains = false;
    at::Tensor gradients, gradient_part;
  };

  bool is_last_stage() const { return mesh_->at.pipeline + 1 == mesh_->shape.pipeline; }
  // Its numbers are those of its replica.
  bool speaks_for_replica() const {
    return is_last_stage() && mesh_->at.tensor == 0 && mesh_->at.context == 0;
  }
  // Of whoever holds the embedding as the head of another stage.
  bool holds_copy(int64_t block) const {
    return block == 0 && is_last_stage() && mesh_->at.pipeline > 0;
  }
  PipelineShape pipeline_shape() const;
  LoadOptions PartialLoad(const LoadOptions& options, const ModelConfig& config) const;
  at::Tensor PartOf(const at::Tensor& flat) const;
  // The rows of the vocabulary that this rank computes, of those that it holds.
  at::Tensor OutputRowsOf(const at::Tensor& head) const;

  // This replica's batches of 0 .. count-1; an error of one rank is that of all.
  absl::StatusOr<std::vector<RaggedBatch>> Inputs(int64_t count, InputFunction input) const;
  int64_t GlobalIndex(int64_t micro_batch) const {
    return micro_batch * data_parallel_size() + mesh_->at.data;
  }
  Stage MakeStage() const;

  void ReduceGradients();
  // Of the parameters that all tensor ranks hold whole.
  void SumOverTensorRanks();
  void SpreadUpdate();
  // The whole parameter on rank 0, from the ranks that hold it. Collective.
  at::Tensor Collected(const Parameter& parameter) const;

  const MegatronOptions megatron_;
  const std::shared_ptr<Communicator> world_;
  std::unique_ptr<ParallelMesh> mesh_;
  std::shared_ptr<ops::TensorParallelGroup> output_group_;  // nullptr: one rank
  std::unique_ptr<Model> model_;
  std::vector<Block> blocks_;
  std::unique_ptr<PieceOptimizer> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_STRATEGY_H_
