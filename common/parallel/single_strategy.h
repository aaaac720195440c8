// The strategy `single`: one process holds the whole model and runs every micro-batch.
#ifndef TANDEM_COMMON_PARALLEL_SINGLE_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_SINGLE_STRATEGY_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel/memory/recompute.h"
#include "common/parallel/optimizer/sharded_optimizer.h"
#include "common/parallel/strategy.h"

namespace tandem::parallel {

class SingleStrategy : public Strategy {
 public:
  SingleStrategy() = default;
  explicit SingleStrategy(Recompute recompute) : recompute_(recompute) {}
  // Trains a model that is already loaded.
  explicit SingleStrategy(std::unique_ptr<Model> model) : model_(std::move(model)) {}

  absl::Status LoadModel(const std::string& directory, const LoadOptions& options) override;
  Model& model() override { return *model_; }
  absl::Status BuildOptimizer(const OptimizerOptions& options) override;
  ranks::Communicator& ranks() override { return *alone_; }
  absl::StatusOr<std::vector<std::vector<double>>> Forward(int64_t count, InputFunction input,
                                                           OutputFunction output) override;
  absl::StatusOr<std::vector<std::vector<double>>> ParallelMap(
      int64_t count,
      absl::FunctionRef<absl::StatusOr<std::vector<double>>(int64_t index)> compute) override;
  absl::Status ForwardBackward(int64_t count, InputFunction input, LossFunction loss) override;
  at::Tensor Gradient(absl::string_view parameter) const override;
  absl::Status Reduce(absl::Span<double> /*sums*/, absl::Span<double> /*maxima*/) override {
    return absl::OkStatus();
  }
  absl::Status ReduceTensor(at::Tensor& /*sums*/) override { return absl::OkStatus(); }
  absl::StatusOr<OptimizerReport> OptimizerStep(const OptimizerOverrides& overrides) override;
  std::vector<Holding> Holdings(const Parameter& parameter, int wanted_by) const override;

 protected:
  ShardedOptimizer& optimizer() const override { return *optimizer_; }

 private:
  // Gives every parameter that trains a gradient. Those of a buffer of which all train lie as its
  // values do, so that one operation adds those of all experts of a layer.
  void AllocateGradients();

  const std::shared_ptr<ranks::Communicator> alone_ = ranks::Communicator::Alone();
  const Recompute recompute_ = Recompute::kNone;
  std::unique_ptr<Model> model_;
  std::vector<at::Tensor> gradients_;  // the memory of those of the parameters that train
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_SINGLE_STRATEGY_H_
