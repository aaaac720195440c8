// One process that holds everything.
#ifndef TANDEM_COMMON_PARALLEL_SINGLE_PROCESS_STRATEGY_H_
#define TANDEM_COMMON_PARALLEL_SINGLE_PROCESS_STRATEGY_H_

#include <memory>
#include <string>
#include <vector>

#include "common/parallel/strategy.h"
#include "common/training/adamw.h"

namespace tandem::parallel {

class SingleProcessStrategy : public Strategy {
 public:
  absl::Status Build(Model& model, const OptimizerOptions& options) override;
  at::Tensor Gradient(absl::string_view parameter) const override;
  absl::Status ForwardBackward(int64_t count,
                               absl::FunctionRef<absl::Status(int64_t)> run) override;
  absl::StatusOr<OptimizerReport> OptimizerStep() override;
  int64_t optimizer_steps() const override { return optimizer_->steps(); }
  absl::Status ResetOptimizer() override;
  absl::StatusOr<NamedTensors> GatherParameters() override;
  absl::Status ScatterParameters(const NamedTensors& parameters) override;
  absl::Status SaveOptimizer(const std::string& directory) override;
  absl::Status LoadOptimizer(const std::string& directory) override;

 private:
  OptimizerOptions options_;
  Model* model_ = nullptr;
  NamedTensors parameters_;            // those that train
  std::vector<at::Tensor> gradients_;  // of these
  std::unique_ptr<training::AdamW> optimizer_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_SINGLE_PROCESS_STRATEGY_H_
