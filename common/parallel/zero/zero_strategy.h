// The strategy `zero`: data parallelism in which the optimizer's state (stage 1), the gradients too
// (stage 2), or the parameters too (stage 3) are sharded over the ranks: ZeRO,
// https://arxiv.org/abs/1910.02054.
//
// Rank r of n runs the micro-batches r, r + n, ... and holds shard r of every block of the model. A
// block's gradients are reduced to the rank that holds their shard. In stages 1 and 2 every rank
// holds all parameters, and all-gathers the updated shards after a step; in stage 3 a block is
// gathered when it runs, forward and backward, and released after it.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_ZERO_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_ZERO_ZERO_STRATEGY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel/memory/recompute.h"
#include "common/parallel/optimizer/shard_plan.h"
#include "common/parallel/optimizer/sharded_optimizer.h"
#include "common/parallel/strategy.h"
#include "common/parallel/zero/block_pass.h"
#include "common/parallel/zero/zero_options.h"
#include "common/ranks/communicator.h"

namespace tandem::parallel {

class ZeroStrategy : public Strategy {
 public:
  ZeroStrategy(const ZeroOptions& options, std::shared_ptr<ranks::Communicator> ranks,
               Recompute recompute = Recompute::kNone)
      : zero_(options), recompute_(recompute), ranks_(std::move(ranks)) {}

  absl::Status LoadModel(const std::string& directory, const LoadOptions& options) override;
  Model& model() override { return *model_; }
  absl::Status BuildOptimizer(const OptimizerOptions& options) override;
  ranks::Communicator& ranks() override { return *ranks_; }
  int64_t data_parallel_size() const override { return ranks_->size(); }
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
  at::Tensor HeldValues(const Parameter& parameter) const override;
  at::Tensor PartOf(const at::Tensor& whole, const Parameter& parameter) const override;

 protected:
  void OnParametersReplaced() override;
  ShardedOptimizer& optimizer() const override { return *optimizer_; }

 private:
  // One of Model::BlockBuffers, and what belongs to it; a `shard` is this rank's.
  struct Buffer {
    int64_t index = 0;
    at::Tensor parameters, parameter_shard;  // float32
    // Stage 3: what is gathered for a pass. In float32 the parameters themselves, else copies in
    // the type of the computation.
    at::Tensor compute, compute_shard;
    bool gathered = false;  // `compute` is whole, or on its way
    bool rounded = false;   // the gathered matrices are, where passes read rounded ones
    ranks::CollectiveHandle gathering;
    bool trains = false;
    at::Tensor gradients, gradient_shard;
    at::Tensor reduced;  // the reduced gradients' shard, while the reduction is under way
    ranks::CollectiveHandle reducing;
  };

  bool shards_parameters() const { return zero_.stage == 3; }
  // Whether ranks hold ranges of the parameter; else each holds all of it.
  bool IsSharded(const Parameter& parameter) const {
    return shards_parameters() && !parameter.has_own_memory();
  }
  // Returns the values of a sharded parameter in a rank's shard of its block.
  ShardRange RangeOf(const Parameter& parameter, int rank) const;
  bool shards_gradients() const { return zero_.stage >= 2; }
  int64_t last_block() const { return model_->num_blocks() - 1; }
  // Returns the buffers that a pass reads of a block: that of its parameters, and that of their
  // adapters.
  std::vector<Buffer*> BuffersOf(int64_t block);
  at::Tensor ShardOf(const at::Tensor& flat) const;

  // Whether passes read copies of the parameters in another type, and copies of shards are kept.
  bool has_copies() const { return !model_->ComputeBuffers().empty(); }
  // Stage 3. Brings the copy of a shard up to date.
  void RefreshCopy(Buffer& buffer) const;
  // Writes those of the parameters that passes read in float32.
  void WidenMasters(Buffer& buffer);
  // Rounds the gathered matrices (Placement::weight_dtype).
  void RoundMatrices(Buffer& buffer);

  // Stage 3. Starts to gather a block for a pass; gathers it, or waits until it is here; frees its
  // memory.
  void StartGathering(int64_t block);
  void Gather(int64_t block);
  void Release(int64_t block);
  // Frees all blocks, which have values from before a change, and brings the copies up to date.
  void DropGathered();

  // Allocates a block's gradients, zeroed.
  void OpenGradients(int64_t block);
  // Sums a block's gradients over the ranks and adds this rank's shard of the sum to its own.
  void StartReducing(int64_t block);
  void FinishReducing(int64_t block);

  // A round: one micro-batch of each rank. A rank without one, or with an error, takes part in the
  // collectives. `then` is called with the hidden states while the head's parameters are here.
  using Then = absl::FunctionRef<absl::Status(const at::Tensor& hidden)>;
  void StartPass(bool has_one, InputFunction input, int64_t micro_batch,
                 std::optional<BlockPass>& pass, absl::Status& status);
  void RunForward(std::optional<BlockPass>& pass, absl::Status& status, Then then);
  void RunBackward(std::optional<BlockPass>& pass, at::Tensor gradient, absl::Status& status,
                   bool reduces);
  // Exchanges the outputs of all ranks, or returns the first rank's error.
  absl::Status Exchange(const absl::Status& status, std::vector<std::vector<double>>& outputs);

  void MakeGradients(Buffer& buffer);
  // Brings the updated shards to the ranks that hold the parameters.
  void GatherUpdate();

  const ZeroOptions zero_;
  const Recompute recompute_;
  const std::shared_ptr<ranks::Communicator> ranks_;
  std::unique_ptr<Model> model_;
  int64_t head_block_ = 0;  // the block that holds the head's parameters
  std::vector<Buffer> buffers_;
  std::unique_ptr<ShardedOptimizer> optimizer_;  // of this rank's shard of every block
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_ZERO_STRATEGY_H_
