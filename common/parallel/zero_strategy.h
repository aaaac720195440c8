// Data parallelism in which the ranks share out the optimizer's state (stage 1), the gradients too
// (stage 2), or the parameters too (stage 3): ZeRO, https://arxiv.org/abs/1910.02054.
//
// Rank r of n takes the micro-batches r, r + n, ... and holds part r of every block of the model. A
// block's gradients are added up where its part is held. In stages 1 and 2 every rank has all
// parameters, and the parts are gathered after an update; in stage 3 a block is gathered when it is
// run, forward and backward, and let go after it.
#ifndef TANDEM_COMMON_PARALLEL_ZERO_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_ZERO_STRATEGY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel/block_pass.h"
#include "common/parallel/communicator.h"
#include "common/parallel/piece_optimizer.h"
#include "common/parallel/strategy.h"
#include "common/parallel/zero_options.h"

namespace tandem::parallel {

class ZeroStrategy : public Strategy {
 public:
  ZeroStrategy(const ZeroOptions& options, std::shared_ptr<Communicator> ranks)
      : zero_(options), ranks_(std::move(ranks)) {}

  absl::Status LoadModel(const std::string& directory, const LoadOptions& options) override;
  Model& model() override { return *model_; }
  absl::Status BuildOptimizer(const OptimizerOptions& options) override;
  Communicator& ranks() override { return *ranks_; }
  int64_t data_parallel_size() const override { return ranks_->size(); }
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
  // Flat, all of them; `shard` is this rank's part.
  struct Block {
    at::Tensor parameters, parameter_shard;
    bool gathered = false;  // the parameters are all there, or on their way
    Pending gathering;
    bool trains = false;
    at::Tensor gradients, gradient_shard;
    at::Tensor reduced;  // what the gradients add up to, while they are added
    Pending reducing;
  };

  bool shards_parameters() const { return zero_.stage == 3; }
  bool shards_gradients() const { return zero_.stage >= 2; }
  int64_t last_block() const { return static_cast<int64_t>(blocks_.size()) - 1; }
  at::Tensor PartOf(const at::Tensor& flat) const;

  // Stage 3. Gathers a block's parameters, or waits until they are there; lets them go.
  void StartGathering(int64_t block);
  void Gather(int64_t block);
  void LetGo(int64_t block);

  // Gives a block's gradients memory, zeroed.
  void OpenGradients(int64_t block);
  // Adds a block's gradients up over the ranks, into this rank's part of them.
  void StartReducing(int64_t block);
  void FinishReducing(int64_t block);

  // One micro-batch of each rank. A rank without one, or with an error, takes part in what the
  // others need. `then` is called with the hidden states while the head is there.
  using Then = absl::FunctionRef<absl::Status(const at::Tensor& hidden)>;
  void StartPass(bool has_one, InputFunction input, int64_t micro_batch,
                 std::optional<BlockPass>& pass, absl::Status& status);
  void RunForward(std::optional<BlockPass>& pass, absl::Status& status, Then then);
  void RunBackward(std::optional<BlockPass>& pass, at::Tensor gradient, absl::Status& status,
                   bool reduces);
  // Gives every rank what the others have computed, or the first error of one.
  absl::Status Exchange(const absl::Status& status, std::vector<std::vector<double>>& outputs);

  void MakeGradients(int64_t block);
  // After an update of this rank's part of the parameters.
  void SpreadUpdate();

  const ZeroOptions zero_;
  const std::shared_ptr<Communicator> ranks_;
  std::unique_ptr<Model> model_;
  int64_t head_block_ = 0;  // where the head's parameters are
  std::vector<Block> blocks_;
  std::unique_ptr<PieceOptimizer> optimizer_;  // of this rank's part of every block
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_ZERO_STRATEGY_H_
